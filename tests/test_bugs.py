"""One test a bug, headed by its story: what the user did, what went wrong, what is right."""

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import InputError
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, ReplicateCheapNodes
from tests import plain
from tests.graphs import places_to_cut, traced

mse = nn.functional.mse_loss


class Net(nn.Module):
    """Layers that the models below put something between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.double()


def data(rows=8):
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def assert_same(model, cuts, *, microbatches=4, steps=2, **options):
    """Steps of the pipeline give the bits of the plain model over the same microbatches."""
    reference, (x, y) = copy.deepcopy(model), data()
    pipe = fxpipe.compile(
        model,
        len(cuts) + 1,
        loss=mse,
        cuts=cuts,
        microbatches=microbatches,
        verify=False,
        **options,
    )
    for seed in range(steps):
        torch.manual_seed(seed)
        got = pipe.step(x, target=y)
        torch.manual_seed(seed)
        want = plain.step(reference, (x,), y, mse, microbatches)
        plain.assert_same(pipe, reference, got, want)
    return pipe


def test_a_model_that_writes_its_input_in_place_trains():
    """A model begins with ``x.mul_(2)``.

    Microbatches are views of the batch and shared its version counter, so the write of the second
    made backward of the first fail. Right: the numbers of the plain model, and the batch left as it
    was.
    """

    class Doubling(Net):
        def forward(self, x):
            return self.b(torch.tanh(self.a(x.mul_(2))))

    x, _ = data()
    before = x.clone()
    pipe = assert_same(Doubling(), ["tanh"])
    pipe.step(x, target=x)
    assert torch.equal(x, before)


def test_gradients_come_back_through_a_container():
    """A model was cut right before ``a, b = x.chunk(2)``.

    The result of chunk is a tuple, which "needs no gradient", so none was sent back and everything
    before the cut kept the gradient None, without a word.
    """

    class Halves(Net):
        def forward(self, x):
            first, second = self.a(x).chunk(2, dim=1)
            return self.b(torch.cat([second, first], dim=1))

    assert_same(Halves(), ["chunk"])


def test_a_write_through_a_chain_of_views_reaches_the_first_name():
    """A tensor was read after a write through ``x.detach().detach()``, with a cut in the chain.

    The receiving stage wrote its own copy, and the first stage sent the value from before the
    write. Right: no cut separates two names of a tensor that is written.
    """

    class Chain(Net):
        def forward(self, x):
            x = self.a(x)
            torch.relu_(x.detach().detach())
            return self.b(x)

    assert "detach_1" not in places_to_cut(Chain(), data()[0])
    assert_same(Chain(), ["detach"])


def test_a_buffer_that_is_read_on_another_stage_is_the_one_of_its_microbatch():
    """``self.calls += 1`` on one stage, ``x + self.calls`` on the next.

    What was sent was the buffer itself, which the next microbatch wrote before it was read. Right:
    who reads the buffer, or a view of it, is on the stage that writes it.
    """

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(4, dtype=torch.float64))

        def forward(self, x):
            x = self.a(x)
            self.calls += 1
            return self.c(self.b(x) + self.calls)

    model = Counting()
    places = places_to_cut(model, data()[0])
    assert "add" not in places
    assert "c" in places
    assert_same(model, ["c"])


def test_statistics_that_a_module_writes_are_no_constants():
    """``x * self.norm.running_var`` stood some stages behind ``self.norm(x)``.

    Values made of buffers alone are computed wherever they are read; this one was read from a copy
    of the buffer that no other rank ever updates. Right: it crosses from the stage of the norm.
    """

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x):
            y = self.b(self.norm(self.a(x)))
            return self.c(y) * (self.norm.running_var + 1e-5)

    pipe = assert_same(Scaled(), ["mul"])
    assert "norm.running_var" in dict(pipe.graph(0).named_buffers())
    assert not list(pipe.graph(1).named_buffers())


def test_what_is_written_into_a_tensor_that_nobody_reads_gets_no_gradient():
    """A model filled a tensor in place and did not use it.

    Every write counted as a way to the output, so zeros came back where the plain model leaves
    None, and an optimizer with weight decay moved the parameters.
    """

    class Wasteful(Net):
        def forward(self, x):
            unread = torch.zeros_like(x)
            unread[:, :2] = self.a(x)[:, :2]
            return self.b(x)

    model = Wasteful()
    assert_same(model, ["setitem"])
    assert model.a.weight.grad is None


def test_a_tied_parameter_that_does_not_reach_the_output_gets_no_gradient():
    """A layer was used on two stages, its results only to write a tensor that nobody reads.

    The stage behind sent zeros, and the parameter got them where the plain model leaves None.
    """

    class Wasteful(Net):
        def forward(self, x):
            torch.relu_(self.a(self.a(x)))
            return self.b(x)

    model = Wasteful()
    assert_same(model, ["a_1"])
    assert model.a.weight.grad is None


def test_an_input_is_written_after_all_stages_have_read_it():
    """The third stage wrote an input in place that the first reads.

    Ranks in one process share the batch, and the third, which waits for nothing, ran first. Right:
    what reads an input that is written is on one stage with the write.
    """

    class Late(Net):
        def forward(self, x):
            y = self.b(self.a(x.clone()))
            x.add_(1)
            return self.c(y + 1)

    model = Late()
    places = places_to_cut(model, data()[0])
    assert "b" not in places
    assert_same(model, ["c"])


def test_random_numbers_are_drawn_in_the_order_of_the_model():
    """The third stage dropped out a value of the first, the second stage another.

    In one process the last rank that can advance does, and the third did not need the second: it
    drew first. Right: a stage goes forward after the one in front of it.
    """

    class Dropping(Net):
        def forward(self, x):
            a = self.a(x)
            b = nn.functional.dropout(self.b(a), 0.5)
            c = nn.functional.dropout(a, 0.5)
            return self.c(c), b

    model, (x, y) = Dropping(), data()
    reference = copy.deepcopy(model)

    def loss(output, target):
        return mse(output[0], target) + output[1].square().mean()

    # the last stage reads b only in the output, so dropout_1 alone holds the third
    pipe = fxpipe.compile(
        model, 4, loss=loss, cuts=["b", "dropout_1", "c"], microbatches=4, verify=False
    )
    torch.manual_seed(1)
    got = pipe.step(x, target=y)
    torch.manual_seed(1)
    plain.assert_same(pipe, reference, got, plain.step(reference, (x,), y, loss, 4))


def test_a_tensor_with_gaps_in_memory_keeps_them_when_it_crosses():
    """Half of a chunk crossed a cut in front of a batch norm.

    It arrived without the gaps, and batch norm adds up contiguous rows in another order: gradients
    differed in the last bit.
    """

    class Strided(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2).double()

        def forward(self, x):
            first, _ = x.mul_(0.5).chunk(2, dim=1)
            return self.b(self.norm(first).repeat(1, 2))

    model, x = Strided(), data()[0]
    pipe = assert_same(model, ["norm"])
    seen = []
    handle = pipe.graph(1).norm.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    pipe.step(x, target=x)
    handle.remove()
    assert {value.stride() for value in seen} == {(4, 1)}


def test_sizes_keep_their_order_however_often_they_are_moved_to_their_readers():
    """``x.view(x.size(0), x.size(1))``: each run of replicate-cheap-nodes turned the two sizes
    round, so that the same model had two texts, and ranks could have disagreed about the plan.
    """

    class Sized(Net):
        def forward(self, x):
            return self.a(x).view(x.size(0), x.size(1)) + x.size(1)

    passes = [AssignStages(()), ReplicateCheapNodes(), ReplicateCheapNodes()]
    _, steps = run_passes(traced(Sized(), data()[0]), passes)
    assert not steps[2].modified
    lines = steps[1].after.splitlines()
    assert [line.split(":")[0].strip() for line in lines if "size" in line][:2] == [
        "size",
        "size_1",
    ]


def test_a_last_batch_that_the_model_refuses_is_told_with_the_module_and_its_line():
    """The last batch of an epoch has six rows, and makes microbatches of one.

    Batch norm refuses a single row. The error was a bare ``ValueError`` out of the shape
    propagation. Right: it names the module and the user's line, as at compile.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    loss = nn.functional.mse_loss
    pipe = fxpipe.compile(model, 2, loss=loss, microbatches=6, example_inputs=((x,), {}))
    with pytest.raises(InputError, match="more than 1 value per channel") as caught:
        pipe.step(x[:6], target=y[:6])
    assert "BatchNorm1d" in caught.value.at
