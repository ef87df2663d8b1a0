import dataclasses

import pytest

from fxpipe.manager import Pass
from fxpipe.passes import REGISTRY, AssignStages, BalanceStages, default_passes


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_file_class_and_name_of_a_pass_share_their_words(name):
    kind = REGISTRY[name]
    assert kind.name == name
    assert kind.__module__ == "fxpipe.passes." + name.replace("-", "_")
    assert kind.__name__ == "".join(word.capitalize() for word in name.split("-"))


@pytest.mark.parametrize("kind", REGISTRY.values(), ids=str)
def test_a_pass_is_a_frozen_value(kind):
    assert issubclass(kind, Pass)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen


def test_the_default_passes_are_registered_and_place_the_nodes_once():
    place = AssignStages(("fc",))
    passes = default_passes(place, training=True)
    assert {type(p) for p in passes} <= set(REGISTRY.values())
    assert [p for p in passes if isinstance(p, (AssignStages, BalanceStages))] == [place]


def test_the_text_of_a_pass_names_the_exact_run():
    assert str(AssignStages(("a", "b.c"))) == "assign-stages{cuts=('a', 'b.c')}"
    assert str(REGISTRY["lower-edges"]()) == "lower-edges"
