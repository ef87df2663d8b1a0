"""The pipeline object, as a user who trains with it sees it."""

import copy
import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import FxpipeError
from fxpipe.errors import InputError, OptionError, PassError, RankError
from fxpipe.ir.text import format_graph
from tests import plain

mse = nn.functional.mse_loss


class Net(nn.Module):
    """Has an option, a batch norm, a tied weight, and a parameter that nobody reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.c.weight = self.a.weight
        self.unread = nn.Parameter(torch.ones(2))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x, scale=1.0, *, shift=None):
        x = torch.tanh(self.b(self.norm(self.a(x)))) * scale
        if shift is not None:
            x = x + shift
        return self.c(x) * self.scratch


def data(rows=8):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def made(*, example=True, **options):
    torch.manual_seed(0)
    model = Net()
    options = {"loss": mse, "microbatches": 4, "cuts": ["norm", "c"], **options}
    if example:
        options["example_inputs"] = ((data()[0],), {})
    stages = len(options["cuts"]) + 1 if options["cuts"] is not None else 3
    return model, fxpipe.compile(model, options.pop("stages", stages), **options)


# -- compiling


def test_without_an_example_it_is_compiled_by_the_first_step():
    _, pipe = made(example=False)
    assert not pipe.compiled
    for look in (
        lambda: pipe.graph(0),
        lambda: pipe.program(0),
        lambda: pipe.plan,
        pipe.report,
        pipe.simulate,
        lambda: pipe.steps,
    ):
        with pytest.raises(FxpipeError, match="not compiled yet") as caught:
            look()
        assert "example_inputs" in caught.value.hint
    # an optimizer can be made all the same: this process holds every stage
    assert len(list(pipe.parameters())) == 8
    x, y = data()
    pipe.step(x, target=y)
    assert pipe.compiled
    assert "3 stages" in pipe.report()


def test_compiling_changes_nothing_about_the_model():
    torch.manual_seed(0)
    model, x = Net(), data()[0]
    before = copy.deepcopy(model.state_dict())
    attributes = {m: set(vars(m)) for m in model.modules()}
    state = torch.get_rng_state()
    code = type(model).forward
    pipe = fxpipe.compile(model, 3, loss=mse, microbatches=2, example_inputs=((x,), {}))
    assert torch.equal(torch.get_rng_state(), state)
    assert {m: set(vars(m)) for m in model.modules()} == attributes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert type(model).forward is code
    assert all(p.grad is None for p in model.parameters())
    pipe.eval()
    assert model.training
    model.eval()
    assert torch.equal(pipe(x), model(x))


def test_the_model_sees_what_training_changes():
    model, pipe = made()
    x, y = data()
    torch.manual_seed(0)
    pipe.step(x, target=y)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.step()
    assert torch.equal(pipe.eval()(x), model.eval()(x))


UNKNOWN = {
    "schedule": ({"schedule": "2F2B"}, OptionError, "2F2B"),
    "cut": ({"cuts": ["norm", "nowhere"]}, PassError, "cut 'nowhere' names no module"),
    "dimension": ({"batch_dims": {"y": 0}}, OptionError, "batch_dims names 'y'"),
    "leaf": ({"leaf_modules": ["nowhere"]}, OptionError, "leaf module 'nowhere' names no module"),
}


@pytest.mark.parametrize(("options", "kind", "problem"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_is_refused_with_the_known_ones(options, kind, problem):
    with pytest.raises(kind, match=problem) as caught:
        made(**options)
    assert caught.value.hint


def test_more_stages_than_can_be_cut_are_refused():
    with pytest.raises(PassError, match="99 stages need 98 cuts, but the model has"):
        made(stages=99, cuts=None)


def test_a_model_on_a_mesh_without_processes_is_refused():
    with pytest.raises(OptionError, match="transport 'gloo' needs several processes") as caught:
        made(transport="gloo")
    assert "torchrun --nproc-per-node 3" in caught.value.hint


# -- inputs


def test_arguments_bind_as_in_the_models_forward():
    model, pipe = made()
    plain_model = copy.deepcopy(model).eval()
    pipe.eval()
    x, shift = data()[0], torch.ones(8, 1)
    calls = (((x,), {}), ((), {"x": x}), ((x, 2.0), {}), ((x,), {"scale": 3.0, "shift": shift}))
    for args, kwargs in calls:
        assert torch.equal(pipe(*args, **kwargs), plain_model(*args, **kwargs))


def test_arguments_that_do_not_bind_are_refused_with_the_signature():
    _, pipe = made()
    with pytest.raises(InputError, match="missing a required argument: 'x'") as caught:
        pipe.step()
    assert caught.value.at == "forward(x, scale=1.0, *, shift=None)"
    with pytest.raises(InputError, match="unexpected keyword argument 'z'"):
        pipe.step(data()[0], z=1)


def test_inputs_with_other_rows_are_refused_and_may_be_said_to_have_none():
    _, pipe = made()
    x, y = data()
    with pytest.raises(
        InputError, match="the inputs do not have the same number of rows"
    ) as caught:
        pipe.step(x, target=y, shift=torch.ones(1, 4))
    assert caught.value.at == "x has 8, shift has 1"
    assert caught.value.hint == "name what has no batch dimension: batch_dims={'shift': None}"
    _, pipe = made(batch_dims={"shift": None})
    assert pipe.step(x, target=y, shift=torch.ones(1, 4)).output.shape == (8, 4)


def test_a_target_with_other_rows_is_refused():
    _, pipe = made()
    with pytest.raises(InputError, match="the target has 5 rows, the batch 8") as caught:
        pipe.step(data()[0], target=torch.zeros(5, 4))
    assert caught.value.at == "target: [5, 4]"


def test_a_batch_without_rows_is_refused():
    _, pipe = made()
    with pytest.raises(InputError, match="the batch has no rows"):
        pipe.step(torch.zeros(0, 4), target=torch.zeros(0, 4))


def test_a_dimension_that_an_input_does_not_have_is_refused():
    with pytest.raises(InputError, match="input x has 2 dimensions and no dimension 5"):
        made(batch_dims={"x": 5})


def test_fewer_rows_than_microbatches_warn_once_and_work(caplog):
    model, pipe = made(microbatches=7, example=False)
    reference = copy.deepcopy(model)
    x, y = data(5)
    model.eval(), reference.eval(), pipe.eval()
    with caplog.at_level(logging.WARNING, "fxpipe"):
        for _ in range(2):
            got = pipe.step(x, target=y)
    assert [r.message for r in caplog.records] == [
        "a batch of 5 rows is cut into 5 microbatches, not 7"
    ]
    want = plain.step(reference, (x,), y, mse, 5)
    assert torch.equal(got.loss, want.loss)


def test_a_loss_that_is_no_number_is_refused():
    _, pipe = made(loss=lambda output, target: output - target)
    with pytest.raises(RankError, match=r"the loss is \[2, 4\], not a 0-dim tensor") as caught:
        pipe.step(*data()[:1], target=data()[1])
    assert "stage 2" in caught.value.at
    assert "mean" in caught.value.hint


def test_an_error_in_the_forward_says_where_and_the_next_step_runs():
    class Picky(nn.Module):
        def forward(self, x, ids):
            return x + nn.functional.one_hot(ids, 4)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.picky, self.b = nn.Linear(4, 4), Picky(), nn.Linear(4, 4)

        def forward(self, x, ids):
            return self.b(self.picky(self.a(x), ids))

    torch.manual_seed(0)
    model, (x, y) = Outer(), data()
    good = torch.zeros(8, dtype=torch.int64)
    bad = good.clone()
    bad[5] = 9  # in the third of four microbatches
    pipe = fxpipe.compile(model, 2, loss=mse, microbatches=4, cuts=["picky"])
    pipe.step(x, good, target=y)
    want = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    with pytest.raises(RankError) as caught:
        pipe.step(x, bad, target=y)
    assert "RuntimeError: Class values must be smaller than num_classes" in caught.value.problem
    for part in ("1F2", "stage 1", "microbatch 2", "module picky (Picky)", "forward"):
        assert part in caught.value.at
    assert "test_pipeline.py" in caught.value.at
    pipe.zero_grad()
    pipe.step(x, good, target=y)
    assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), want, strict=True))


# -- results


def test_a_step_gives_the_loss_and_the_output_detached():
    _, pipe = made()
    x, y = data()
    result = pipe.step(x, target=y)
    assert result.loss.dim() == 0
    assert not result.loss.requires_grad
    assert result.output.shape == (8, 4)
    assert not result.output.requires_grad


def test_no_gradients_are_made_in_eval_mode_or_under_no_grad():
    _, pipe = made()
    x, y = data()
    with torch.no_grad():
        assert pipe.step(x, target=y).loss > 0
    pipe.eval()
    assert pipe.step(x, target=y).loss > 0
    assert not pipe(x).requires_grad
    assert all(p.grad is None for p in pipe.parameters())


def test_the_mode_can_be_asked_for_and_is_returned():
    _, pipe = made()
    assert pipe.training
    assert pipe.eval() is pipe
    assert not pipe.training
    assert pipe.train().training
    assert not pipe.train(False).training


def test_targets_may_be_containers_and_scalars():
    def loss(output, target):
        return mse(output * target["scale"], target["y"][0]) + target["power"]

    _, pipe = made(loss=loss)
    x, y = data()
    target = {"y": (y,), "scale": torch.tensor(2.0), "power": 3}
    result = pipe.step(x, target=target)
    assert torch.isclose(result.loss, mse(result.output * 2, y) + 3)


# -- parameters and state


def test_parameters_have_their_original_names_and_a_tied_one_its_first():
    model, pipe = made()
    found = dict(pipe.named_parameters())
    assert list(found) == [n for n, _ in model.named_parameters()]
    assert {"unread", "a.weight", "c.bias", "norm.weight"} <= set(found)
    assert "c.weight" not in found
    assert all(found[n] is p for n, p in model.named_parameters())
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in found.values()]


def test_buffers_have_their_original_names():
    model, pipe = made()
    found = dict(pipe.named_buffers())
    assert list(found) == [n for n, _ in model.named_buffers()]
    assert all(found[n] is b for n, b in model.named_buffers())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared(set_to_none):
    _, pipe = made()
    x, y = data()
    pipe.step(x, target=y)
    assert all(p.grad.any() for n, p in pipe.named_parameters() if n not in ("unread", "a.bias"))
    pipe.zero_grad(set_to_none=set_to_none)
    for name, parameter in pipe.named_parameters():
        if set_to_none or name == "unread":
            assert parameter.grad is None
        else:
            assert not parameter.grad.any()


def test_the_state_dict_is_that_of_the_model():
    model, pipe = made()
    state, want = pipe.state_dict(), model.state_dict()
    assert isinstance(state, OrderedDict)
    assert list(state) == list(want)
    assert "scratch" not in state
    assert all(torch.equal(state[k], want[k]) for k in want)
    assert state._metadata == want._metadata
    assert pipe.full_state_dict().keys() == want.keys()


def test_a_state_dict_is_loaded():
    _, pipe = made()
    state = {k: torch.full_like(v, 2) for k, v in pipe.state_dict().items()}
    pipe.load_state_dict(state)
    assert all((v == 2).all() for v in pipe.state_dict().values())
    partial = {"b.bias": torch.zeros(4)}
    pipe.load_state_dict(partial, strict=False)
    assert not pipe.state_dict()["b.bias"].any()
    assert (pipe.state_dict()["b.weight"] == 2).all()


def test_a_state_dict_that_lacks_or_adds_an_entry_is_refused_by_name():
    _, pipe = made()
    state = dict(pipe.state_dict())
    del state["b.bias"]
    state["z"] = torch.zeros(1)
    with pytest.raises(InputError, match="lacks 1 entries and has 1 unknown ones") as caught:
        pipe.load_state_dict(state)
    assert caught.value.at == "missing: ['b.bias']; unknown: ['z']"


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_as_torch_clips_those_of_the_model(norm_type):
    model, pipe = made()
    reference = copy.deepcopy(model)
    x, y = data()
    pipe.step(x, target=y)
    plain.step(reference, (x,), y, mse, 4)
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    assert torch.isclose(pipe.clip_grad_norm_(0.1, norm_type), want, rtol=1e-6)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            found = dict(pipe.named_parameters())[name].grad
            assert torch.allclose(found, parameter.grad, rtol=1e-6), name


def test_a_norm_that_is_not_finite_may_be_an_error():
    _, pipe = made()
    x, y = data()
    pipe.step(x, target=y)
    next(iter(pipe.parameters())).grad = torch.full((2,), torch.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)


# -- looking inside


def test_graphs_programs_and_the_report_show_what_runs():
    _, pipe = made()
    assert "call_module[norm]" in format_graph(pipe.graph(1))
    assert str(pipe.program(2)[-1]) == "2SEND_B3"
    assert pipe.report() == pipe.plan.report()
    assert pipe.simulate().makespan > 0
    assert [s.spec.partition("{")[0] for s in pipe.steps][-1] == "lower-edges"
    before = pipe.report()
    pipe.step(data(9)[0], target=data(9)[1])
    pipe.eval()(data()[0])
    assert pipe.report() == before  # the plan is that of the first batch


@pytest.mark.parametrize(("what", "index"), [("stage", 3), ("stage", -1), ("rank", 3)])
def test_a_stage_or_rank_that_is_not_there_is_refused(what, index):
    _, pipe = made()
    look = pipe.graph if what == "stage" else pipe.program
    with pytest.raises(OptionError, match=f"there is no {what} {index}") as caught:
        look(index)
    assert caught.value.hint == f"{what}s are 0 to 2"


def test_freezing_a_part_after_compiling_is_seen():
    model, pipe = made()
    reference = copy.deepcopy(model)
    x, y = data()
    for m in (model, reference):
        m.b.requires_grad_(False)
    got = pipe.step(x, target=y)
    want = plain.step(reference, (x,), y, mse, 4)
    plain.assert_same(pipe, reference, got, want)
    assert model.b.weight.grad is None
    for m in (model, reference):
        m.b.requires_grad_(True)
        m.zero_grad()
    got = pipe.step(x, target=y)
    plain.assert_same(pipe, reference, got, plain.step(reference, (x,), y, mse, 4))


def test_a_part_of_the_model_may_be_in_another_mode():
    torch.manual_seed(0)
    model = Net()
    model.norm.eval()
    reference = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 3, loss=mse, microbatches=4, cuts=["norm", "c"])
    x, y = data()
    got = pipe.step(x, target=y)
    plain.assert_same(pipe, reference, got, plain.step(reference, (x,), y, mse, 4))
