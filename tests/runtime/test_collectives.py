"""What all ranks do together: the same bits in one process and in several."""

import pytest
import torch

from fxpipe.runtime.collectives import make_collectives
from fxpipe.runtime.launch import join_world
from tests.ranks import run_ranks

# in float32 the order of this sum shows: (a + b) + c != a + (b + c)
VALUES = [1.0, 1e8, -1e8]


def at_every_rank(call):
    """What `call` returns with all of three ranks in one process, and on each of three ranks."""

    def rank_main(rank):
        return call(make_collectives(join_world(3), 3))

    return [call(make_collectives(None, 3)), *run_ranks(3, rank_main)]


def test_a_sum_over_some_ranks_is_in_rank_order_and_leaves_the_others_alone():
    def call(collectives):
        tensors = {r: torch.full((2, 3), VALUES[r]) for r in collectives.held}
        collectives.add(tensors, (0, 1, 2))
        halves = {r: torch.tensor(r + 1, dtype=torch.bfloat16) for r in collectives.held}
        collectives.add(halves, (0, 2))
        return {r: (tensors[r].tolist(), halves[r].item()) for r in collectives.held}

    local, *world = at_every_rank(call)
    total = (torch.tensor(VALUES[0]) + VALUES[1] + VALUES[2]).item()
    assert total != sum(VALUES)
    assert local == {r: ([[total] * 3] * 2, half) for r, half in enumerate((4.0, 2.0, 4.0))}
    assert world == [{r: local[r]} for r in range(3)]


def test_a_sum_keeps_strides_and_gradients_that_are_not_contiguous():
    def call(collectives):
        tensors = {r: torch.arange(6.0).view(2, 3).t().mul(r + 1) for r in collectives.held}
        collectives.add(tensors, (0, 1))
        return [(t.tolist(), t.stride()) for r, t in tensors.items() if r == 0]

    local, first, *_ = at_every_rank(call)
    assert local == first == [([[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]], (1, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_value_of_one_rank_reaches_all_with_its_dtype(dtype):
    def call(collectives):
        known = 2 in collectives.held
        value = torch.tensor(2.5 if known else -1.0, dtype=dtype, requires_grad=known)
        return collectives.broadcast(value, source=2)

    for value in at_every_rank(call):
        assert value.dtype is dtype
        assert value.shape == ()
        assert value.item() == 2.5
        assert not value.requires_grad


def test_scalars_are_reduced_over_all_ranks():
    def call(collectives):
        values = {r: torch.tensor(VALUES[r]) for r in collectives.held}
        return [collectives.reduce(values, how).item() for how in ("sum", "max")]

    total = (torch.tensor(VALUES[0]) + VALUES[1] + VALUES[2]).item()
    assert at_every_rank(call) == [[total, 1e8]] * 4


def test_objects_of_any_size_are_gathered_in_rank_order():
    def call(collectives):
        return collectives.gather({r: {"rank": r, "w": [0] * 10**r} for r in collectives.held})

    for values in at_every_rank(call):
        assert values == [{"rank": r, "w": [0] * 10**r} for r in range(3)]
