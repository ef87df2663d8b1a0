"""Containers are taken apart and put together with their class, order and everything in them."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.tree import TreeSpec, flatten, map_leaves


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None


@dataclasses.dataclass(frozen=True)
class Checked:
    value: Any

    def __post_init__(self) -> None:
        if self.value == "leaf":
            raise ValueError("not a value")


class Output(collections.OrderedDict):
    """A mapping whose constructor takes its entries, as Hugging Face's are."""


class Registered:
    def __init__(self, a: Any, b: Any, scale: int) -> None:
        self.a, self.b, self.scale = a, b, scale


pytree.register_pytree_node(
    Registered,
    lambda r: ([r.a, r.b], r.scale),
    lambda parts, scale: Registered(*parts, scale),
    serialized_type_name="tests.test_tree.Registered",
)

containers = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Batch, inner, inner)
    ),
    max_leaves=12,
)


@given(containers)
def test_a_value_put_together_again_equals_the_value(value: Any) -> None:
    leaves, spec = flatten(value)
    assert spec.unflatten(leaves) == value
    assert spec.num_leaves == len(leaves) == len(spec.paths())


@given(containers, containers)
def test_specs_are_equal_where_values_without_their_leaves_print_the_same(a: Any, b: Any) -> None:
    same = repr(map_leaves(lambda _: None, a)) == repr(map_leaves(lambda _: None, b))
    assert (flatten(a)[1] == flatten(b)[1]) == same
    if same:
        assert hash(flatten(a)[1]) == hash(flatten(b)[1])


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        Output(z=1, a=2),
        types.MappingProxyType({"a": 1}),
        collections.UserDict({"a": {"b": 2}}),
        Checked(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_keeps_its_class_and_its_order(value: Any) -> None:
    leaves, spec = flatten(value)
    again = spec.unflatten(leaves)
    assert type(again) is type(value)
    assert again == value
    assert list(getattr(again, "keys", tuple)()) == list(getattr(value, "keys", tuple)())


def test_what_torch_pytree_knows_is_a_container_with_its_context() -> None:
    leaves, spec = flatten(Registered(1, [2], scale=5))
    assert leaves == [1, 2]
    again = spec.unflatten([3, 4])
    assert (again.a, again.b, again.scale) == (3, [4], 5)
    assert spec != flatten(Registered(1, [2], scale=6))[1]


def test_a_return_type_of_torch_is_rebuilt_with_its_fields() -> None:
    value = torch.max(torch.eye(2), 1)
    again = map_leaves(lambda t: t + 1, value)
    assert type(again) is type(value)
    assert torch.equal(again.indices, value.indices + 1)


@pytest.mark.parametrize(
    "leaf", [torch.eye(2), torch.Size([2]), {1, 2}, torch.nn.Linear(1, 1), Batch, range(3), "text"]
)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    leaves, spec = flatten([leaf])
    assert leaves[0] is leaf
    assert spec.num_leaves == 1


def test_a_mapping_that_cannot_be_made_of_a_dict_is_a_leaf() -> None:
    class Config(collections.UserDict):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__({"a": 1})

    config = Config()
    assert flatten(config)[0] == [config]


def test_a_dataclass_is_rebuilt_past_its_checks() -> None:
    assert map_leaves(lambda _: "leaf", Checked(3)).value == "leaf"


def test_paths_read_as_the_user_writes_them() -> None:
    value = {"batch": Batch([1, Point(2, 3)]), 4: (5,)}
    names = flatten(value)[1].names("inputs")
    assert names == [
        "inputs['batch'].ids[0]",
        "inputs['batch'].ids[1].x",
        "inputs['batch'].ids[1].y",
        "inputs['batch'].mask",
        "inputs[4][0]",
    ]


def test_a_spec_prints_as_the_structure_it_is() -> None:
    spec = flatten({"loss": 1, "rest": [(2,), Batch(3), Point(4, 5)]})[1]
    assert str(spec) == "{'loss': *, 'rest': [(*,), Batch(ids=*, mask=*), Point(x=*, y=*)]}"


def test_a_wrong_number_of_leaves_is_reported() -> None:
    spec: TreeSpec = flatten([1, 2])[1]
    with pytest.raises(ValueError, match="has 2 leaves, 3 were given"):
        spec.unflatten([1, 2, 3])
