"""A pipeline takes the way that the model takes for the sizes at hand."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import variants
from fxpipe.errors import InputError
from tests.ranks import run_ranks


def squares(output: Any, target: Any) -> Tensor:
    return output.pow(2).mean()


class Looks(nn.Module):
    """Four layers; what `function` makes of the input depends on its size."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self, x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def by_length(self: Looks, x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 5 else x - 1


def loops(self: Looks, x: Tensor) -> Tensor:
    y = x[:, 0]
    for i in range(x.shape[1]):
        y = y + self.layers[0](x[:, i])
    return y


def compiled(model: nn.Module, *shape: int, **options: Any) -> fxpipe.Pipeline:
    options = {"microbatches": 2, "loss": squares, "cuts": ["layers.2"], **options}
    return fxpipe.compile(model, 2, example_inputs=((torch.randn(shape),), {}), **options)


def assert_steps(pipe: fxpipe.Pipeline, model: nn.Module, *shape: int) -> None:
    """A step gives the loss and gradients of the model over the same microbatches."""
    x = torch.randn(shape)
    model.zero_grad()
    losses = []
    pieces = x.tensor_split(2)
    for piece in pieces:
        losses.append(squares(model(piece), None) * (len(piece) / len(x)))
        losses[-1].backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    result = pipe.step(x)
    assert torch.equal(result.loss, sum(losses[1:], losses[0]))
    assert torch.equal(result.output, torch.cat([model(piece) for piece in pieces]))
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, want[name]), name


@pytest.mark.parametrize("function", [by_length, loops])
def test_a_step_of_another_size_takes_the_models_other_way(function: Any) -> None:
    model = Looks(function)
    pipe = compiled(model, 4, 5, 4)
    for length in (5, 3, 7, 5, 9):
        assert_steps(pipe, model, 4, length, 4)


def test_a_graph_serves_all_sizes_for_which_its_guards_hold() -> None:
    model = Looks(by_length)
    pipe = compiled(model, 4, 5, 4)
    first = pipe.graph(0)
    counts = [len(_graphs(pipe))]
    for shape in ((4, 3, 4), (6, 4, 4), (4, 6, 4), (4, 9, 4), (4, 5, 4)):
        pipe.step(torch.randn(shape))
        counts.append(len(_graphs(pipe)))
    assert counts == [1, 1, 1, 2, 2, 2]
    assert pipe.graph(0) is first  # what is printed is what was planned


def test_parameters_stay_on_their_stages_when_another_graph_is_made() -> None:
    model = Looks(loops)  # the first layer is read as often as there are positions
    pipe = compiled(model, 4, 2, 4)
    pipe.step(torch.randn(4, 9, 4))
    owners = [dict(compiled.owners) for compiled in _graphs(pipe)]
    assert len(owners) == 2
    assert owners[0] == owners[1]


def test_microbatches_that_differ_by_a_row_and_need_two_graphs_are_refused_with_the_line() -> None:
    def pairs(self: Looks, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x

    model = Looks(pairs)
    pipe = compiled(model, 4, 4)
    with pytest.raises(InputError, match="the 2 microbatches of this batch differ") as caught:
        pipe.step(torch.randn(5, 4))
    line = pairs.__code__.co_firstlineno + 1
    assert caught.value.at == f"test_shape_guards.py:{line} in pairs"
    assert "divides the rows" in caught.value.hint
    assert_steps(pipe, model, 8, 4)
    assert_steps(pipe, model, 6, 4)
    assert len(_graphs(pipe)) == 2  # the one for three rows was made at the failed step


def test_the_oldest_graph_goes_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(variants, "MAX_GRAPHS", 2)
    model = Looks(loops)
    pipe = compiled(model, 4, 1, 4)
    with caplog.at_level(logging.WARNING, logger="fxpipe.variants"):
        for length in (2, 3, 1, 3):
            assert_steps(pipe, model, 4, length, 4)
    assert len(_graphs(pipe)) == 2
    assert len(pipe._builder._sessions) == 2
    assert "Looks takes more than 2 ways" in caplog.text


def test_a_graph_asked_for_the_layout_of_other_sizes_refuses() -> None:
    pipe = compiled(Looks(by_length), 4, 5, 4)
    (graph,) = _graphs(pipe)
    with pytest.raises(InputError, match="the graph is for other sizes"):
        graph.probe.layout([torch.randn(2, 6, 4)])


def test_ranks_agree_on_the_graph_of_each_batch() -> None:
    def rank(number: int) -> None:
        torch.manual_seed(0)
        model, plain = Looks(by_length), Looks(by_length)
        plain.load_state_dict(model.state_dict())
        pipe = compiled(model, 4, 5, 4)
        for length in (5, 7, 5):
            x = torch.randn(4, length, 4)
            want = torch.stack([squares(plain(piece), None) for piece in x.tensor_split(2)]).mean()
            assert torch.equal(pipe.step(x).loss, want)

    run_ranks(2, rank)


def _graphs(pipe: fxpipe.Pipeline) -> list[Any]:
    found = [v.compiled for graphs in pipe._builder._variants._by_key.values() for v in graphs]
    assert all(graph in pipe._builder._variants for graph in found)
    return found


@torch.fx.wrap
def reshaped(x: Tensor, sizes: list[int]) -> Tensor:
    sizes.append(-1)
    return x.view(sizes)


def test_functions_may_write_the_lists_that_they_are_given() -> None:
    model = Looks(lambda self, x: reshaped(x, [x.shape[0], 4]))
    assert_steps(compiled(model, 4, 4, 4), model, 6, 4, 4)


# ---------------------------------------------------------------------------------------------
# Where the rows of the output are


class Outputs(nn.Module):
    """Results whose rows are in several dimensions, or that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.b(self.a(x))
        return {
            "first": y,
            "second": y.transpose(0, 1),
            "flat": y.flatten(0, 1),
            "none": self.b.weight * 2,
            "scalar": y.mean(),
            "rows": x.shape[0],
        }


def test_leaves_are_joined_along_the_dimension_of_their_rows() -> None:
    model = Outputs()
    x = torch.randn(5, 3, 4)
    pipe = fxpipe.compile(
        model, 2, microbatches=2, cuts=["b"], loss=lambda out, _: out["scalar"]
    ).eval()
    got = pipe(x)
    one, two = (model(piece) for piece in x.tensor_split(2))
    assert torch.equal(got["first"], torch.cat([one["first"], two["first"]]))
    assert torch.equal(got["second"], torch.cat([one["second"], two["second"]], 1))
    assert torch.equal(got["flat"], torch.cat([one["flat"], two["flat"]]))
    assert torch.equal(got["none"], one["none"])
    assert torch.equal(got["scalar"], one["scalar"] * (3 / 5) + two["scalar"] * (2 / 5))
    assert got["rows"] == 3


def test_gradients_of_joined_leaves_reach_the_microbatch_they_came_from() -> None:
    model, plain = Outputs(), Outputs()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 4)
    pipe = fxpipe.compile(model, 2, microbatches=2, cuts=["b"])
    weights = torch.randn(3, 4, 4)

    def loss(second: Tensor, none: Tensor) -> Tensor:
        return (second * weights).sum() + none.pow(2).sum()

    got = pipe(x)
    loss(got["second"], got["none"]).backward()
    pieces = [plain(piece)["second"] for piece in x.tensor_split(2)]
    loss(torch.cat(pieces, 1), plain.b.weight * 2).backward()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_rows_are_in_dimension_0_where_no_other_number_of_rows_can_be_tried() -> None:
    model = Looks(lambda self, x: x.view(2, 3, 4))  # for two rows and no others
    pipe = compiled(model, 4, 3, 4)
    assert pipe.output_dims((torch.randn(4, 3, 4),), {}) == (0,)
    assert_steps(pipe, model, 4, 3, 4)


def test_verify_joins_the_outputs_of_the_plain_model_in_the_same_way() -> None:
    result = fxpipe.verify(
        Outputs(), (torch.randn(4, 3, 4),), stages=2, loss=lambda out, _: out["scalar"]
    )
    assert all(row.equal for row in result.rows)
    assert "output['second']" in {row.name for row in result.rows}


def test_scripts_join_outputs_along_the_same_dimensions(tmp_path: Any) -> None:
    pipe = fxpipe.compile(
        Outputs(),
        2,
        microbatches=2,
        cuts=["b"],
        loss=lambda out, _: out["scalar"],
        example_inputs=((torch.randn(4, 3, 4),), {}),
    )
    assert "output_dims=(0, 1, 0, None, 0, None)," in pipe.code(1)
