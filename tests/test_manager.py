import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

from fxpipe.errors import PassError, VerifyError
from fxpipe.ir.text import format_graph
from fxpipe.manager import Pass, run_passes
from tests.graphs import traced


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x))


@dataclasses.dataclass(frozen=True)
class SigmoidForRelu(Pass):
    name: ClassVar[str] = "sigmoid-for-relu"

    def run(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = torch.sigmoid
        return gm


@dataclasses.dataclass(frozen=True)
class Nothing(Pass):
    name: ClassVar[str] = "nothing"


def no_relu(gm):
    """A check that a graph of ``Net`` passes only once it is rewritten."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
        raise VerifyError(f"%{node} is a relu", at="here", hint="run sigmoid-for-relu")


def net():
    model, x = Net(), torch.randn(2, 4)
    return model, x, traced(model, x)


def test_the_callers_graph_stays_and_the_result_shares_its_parameters():
    model, x, gm = net()
    text, want = format_graph(gm), gm(x)
    out, steps = run_passes(gm, [SigmoidForRelu()])
    assert format_graph(gm) == text
    assert torch.equal(gm(x)[0], want[0])
    assert torch.equal(out(x)[0], torch.sigmoid(model.fc(x)))  # the manager recompiled it
    assert out.fc.weight is gm.fc.weight is model.fc.weight
    assert steps[0].modified


def test_a_step_holds_the_text_before_and_after():
    *_, gm = net()
    out, steps = run_passes(gm, [SigmoidForRelu(), SigmoidForRelu()])
    assert [s.spec for s in steps] == ["sigmoid-for-relu"] * 2
    assert [s.modified for s in steps] == [True, False]
    assert steps[0].before == format_graph(gm)
    assert steps[0].after == steps[1].before == steps[1].after == format_graph(out)


def test_what_a_pass_requires_is_checked_before_it_runs():
    class Demanding(SigmoidForRelu):
        requires: ClassVar = (no_relu,)

    with pytest.raises(PassError) as caught:
        run_passes(net()[2], [Demanding()])
    assert caught.value.problem == "pass sigmoid-for-relu failed: %relu is a relu"
    assert caught.value.at == "here"
    assert caught.value.hint == "run sigmoid-for-relu"
    assert isinstance(caught.value.__cause__, VerifyError)


def test_what_a_pass_ensures_is_checked_on_its_result():
    class Promising(SigmoidForRelu):
        ensures: ClassVar = (no_relu,)

    run_passes(net()[2], [Promising()])

    class Lying(Promising):
        name: ClassVar[str] = "lying"

        def run(self, gm):
            return gm

    with pytest.raises(PassError, match="pass lying failed: %relu is a relu"):
        run_passes(net()[2], [Lying()])


def test_an_error_without_a_hint_is_told_the_passes_before():
    class Failing(SigmoidForRelu):
        name: ClassVar[str] = "failing"

        def run(self, gm):
            raise VerifyError("no")

    with pytest.raises(PassError) as caught:
        run_passes(net()[2], [SigmoidForRelu(), Failing()])
    assert caught.value.hint == "passes before it: sigmoid-for-relu"
    with pytest.raises(PassError) as caught:
        run_passes(net()[2], [Failing()])
    assert caught.value.hint == "passes before it: (none)"


def test_a_graph_that_a_pass_broke_does_not_get_far():
    class Breaking(SigmoidForRelu):
        def run(self, gm):
            nodes = list(gm.graph.nodes)
            nodes[-2].append(nodes[1])  # behind its reader
            return gm

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run_passes(net()[2], [Breaking()])


def test_a_pass_without_a_body_is_a_mistake():
    with pytest.raises(TypeError, match="Nothing is a pass without a body"):
        run_passes(net()[2], [Nothing()])


def test_each_pass_leaves_its_text_in_the_dump_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPIPE_DUMP", str(tmp_path))
    _, steps = run_passes(net()[2], [SigmoidForRelu(), SigmoidForRelu()])
    files = sorted(tmp_path.rglob("*.txt"))
    assert [f.name for f in files] == ["01-sigmoid-for-relu.txt", "02-sigmoid-for-relu.txt"]
    assert files[0].read_text() == steps[0].after
