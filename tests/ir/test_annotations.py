import re
from pathlib import Path

import pytest
import torch
from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir import annotations as notes
from tests.graphs import traced

ROOT = Path(__file__).parents[2]


@pytest.fixture
def node():
    return fx.Graph().placeholder("x")


def test_a_node_without_a_stage_is_named_with_what_to_run(node):
    assert notes.stage_of(node) is None
    with pytest.raises(VerifyError, match="node %x has no stage") as caught:
        notes.require_stage(node)
    assert "assign-stages" in caught.value.hint
    notes.set_stage(node, 0)
    assert notes.require_stage(node) == 0


def test_a_node_without_a_cost_is_named(node):
    assert notes.find_cost(node) is None
    with pytest.raises(VerifyError, match="node %x has no cost"):
        notes.cost_of(node)


def test_what_was_never_noted_has_a_default(node):
    assert notes.source_of(node) == ""
    assert notes.module_path_of(node) == notes.mutates_of(node) == notes.routes_of(node) == ()
    assert not notes.updates_buffers(node)
    assert not notes.is_random(node)
    assert notes.value_of(node) is notes.result_is_of(node) is None
    assert notes.checkpoint_region_of(node) is None


def test_the_canonical_name_of_a_tied_tensor_is_its_first():
    shared = torch.nn.Linear(2, 2)
    gm = traced(torch.nn.Sequential(shared, torch.nn.ReLU(), shared), torch.randn(1, 2))
    assert notes.canonical_name(gm, "2.weight") == "0.weight"
    assert notes.canonical_name(gm, "0.weight") == "0.weight"
    assert notes.canonical_name(gm, "unknown") == "unknown"


def test_no_other_file_spells_a_key():
    spelled = re.compile(r"""\.meta(\.\w+\(|\[)"fxpipe\.|"fxpipe\.\w+" in \w+\.meta""")
    sources = [*ROOT.glob("fxpipe/**/*.py"), *ROOT.glob("passes/*.py")]
    assert spelled.search('node.meta["fxpipe.stage"]')
    assert not [p.name for p in sources if spelled.search(p.read_text(encoding="utf-8"))]
