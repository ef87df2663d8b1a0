import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import InputError
from fxpipe.runtime.microbatches import (
    BatchDims,
    batch_dims_of,
    combine,
    loss_weights,
    merge_leaves,
    piece_rows,
    split_gradients,
    split_target,
)


@given(st.integers(1, 12), st.integers(0, 40))
def test_rows_are_dealt_out_evenly_and_in_order(count, more):
    x = torch.arange(count + more)
    pieces = [piece for (piece,) in BatchDims(("x",), (0,)).split([x], count)]
    assert torch.equal(torch.cat(pieces), x)
    assert [len(piece) for piece in pieces] == piece_rows(len(x), count)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_each_input_is_cut_along_its_own_dimension():
    dims = batch_dims_of(["x", "mask", "scale"], ["x", "mask", "scale"], {"mask": 1, "scale": None})
    batch = [torch.ones(4, 3), torch.ones(2, 4), torch.ones(3)]
    assert dims.rows(batch) == 4
    first, second = dims.split(batch, 2)
    assert [tuple(t.shape) for t in first] == [(2, 3), (2, 2), (3,)]
    assert second[2] is batch[2]


def test_a_number_in_a_tensor_is_given_to_every_microbatch():
    dims = BatchDims(("x", "n"), (0, 0))
    n = torch.tensor(3.0)
    assert dims.rows([torch.ones(4, 1), n]) == 4
    assert all(piece[1] is n for piece in dims.split([torch.ones(4, 1), n], 2))


def test_microbatches_are_views_unless_the_model_writes_them():
    x = torch.zeros(4)
    views = BatchDims(("x",), (0,)).split([x], 2)
    copies = BatchDims(("x",), (0,), (True,)).split([x], 2)
    x.fill_(1)
    assert views[1][0].all()
    assert not copies[1][0].any()


def test_a_model_without_inputs_has_no_rows():
    with pytest.raises(InputError, match="the batch has no rows"):
        BatchDims((), ()).rows([])


def test_targets_are_cut_inside_of_containers():
    y = torch.arange(5)
    first, second = split_target({"y": (y, None), "n": 3, "w": torch.tensor(2.0)}, 5, 2)
    assert torch.equal(first["y"][0], y[:3])
    assert torch.equal(second["y"][0], y[3:])
    assert (first["y"][1], second["n"], float(second["w"])) == (None, 3, 2.0)
    assert split_target(None, 5, 3) == [None] * 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_weights_make_the_mean_over_all_rows(rows):
    values = [torch.randn(n, dtype=torch.float64) for n in rows]
    mean = combine([v.mean() for v in values], loss_weights(rows, "mean"))
    assert torch.allclose(mean, torch.cat(values).mean())
    total = combine([v.sum() for v in values], loss_weights(rows, "sum"))
    assert torch.allclose(total, torch.cat(values).sum())


OUTPUTS = [
    [torch.ones(2, 3), torch.tensor(1.0), torch.ones(5, 2), torch.ones(4), "text"],
    [torch.zeros(1, 3), torch.tensor(4.0), torch.zeros(5, 1), torch.zeros(4), "other"],
]
DIMS = [0, None, 1, None, None]
WEIGHTS = [2 / 3, 1 / 3]


def test_outputs_are_joined_along_their_rows_and_numbers_combined_as_the_loss():
    rows, number, columns, shared, text = merge_leaves(OUTPUTS, WEIGHTS, DIMS)
    assert rows.shape == (3, 3)
    assert torch.isclose(number, torch.tensor(2.0))
    assert torch.equal(columns[0], torch.tensor([1.0, 1.0, 0.0]))
    assert shared is OUTPUTS[0][3]
    assert text == "text"


def test_gradients_of_outputs_go_to_the_microbatches_that_made_them():
    gradient = torch.arange(9.0).view(3, 3)
    given_gradients = [gradient, torch.tensor(3.0), None, torch.ones(4), None]
    first, second = split_gradients(given_gradients, OUTPUTS, WEIGHTS, DIMS)
    assert torch.equal(first[0], gradient[:2])
    assert torch.equal(second[0], gradient[2:])
    assert (float(first[1]), float(second[1])) == (2.0, 1.0)
    assert first[2] is second[2] is None
    assert torch.equal(first[3], torch.ones(4))
    assert second[3] is None
