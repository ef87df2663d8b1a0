"""Every private torch name does what its wrapper says, on the torch that is installed."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxpipe import compat


def test_somebody_looked_at_the_installed_minor_version_of_torch():
    minor = ".".join(torch.__version__.split(".")[:2])
    assert minor in compat.CHECKED_VERSIONS, (
        f"torch {minor} is new: run this file, look at every name in compat.py, then add it"
    )


def test_views_share_a_storage_id_and_copies_do_not():
    x = torch.ones(4)
    assert compat.storage_id(x) == compat.storage_id(x[1:].view(3, 1).detach())
    assert compat.storage_id(x) != compat.storage_id(x.clone())
    with compat.fake_mode():
        fake = torch.empty(4)
        assert compat.storage_id(fake) == compat.storage_id(fake[1:])
        assert compat.storage_id(fake) != compat.storage_id(torch.empty(4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.none = None
        self.register_module("missing", None)


def test_a_shared_module_has_modes_of_its_own_and_the_same_state():
    model = Net()
    shared = compat.share_module(model)
    shared.eval()
    assert model.block[1].training
    assert not shared.block[1].training
    assert shared.missing is None
    assert shared.block[0].weight is model.block[0].weight
    assert shared.block[1].running_mean is model.block[1].running_mean
    shared.block[1].running_mean.add_(1)
    assert model.block[1].running_mean[0] == 1


def test_state_is_replaced_in_the_copy_alone():
    model = nn.BatchNorm1d(2)
    shared = compat.share_module(model)
    parameter, buffer = nn.Parameter(torch.zeros(2)), torch.full((2,), 5.0)
    old = model.weight, model.running_mean
    compat.replace_state(shared, model.weight, parameter)
    compat.replace_state(shared, model.running_mean, buffer)
    assert (shared.weight is parameter, shared.running_mean is buffer) == (True, True)
    assert (model.weight, model.running_mean) == old
    assert dict(shared.named_parameters())["weight"] is parameter


def test_a_recurrent_layer_computes_with_what_replaced_its_weights():
    layer = nn.GRU(2, 2)
    shared, x = compat.share_module(layer), torch.ones(1, 1, 2)
    want = layer(x)[0]
    for parameter in layer.parameters():
        compat.replace_state(shared, parameter, nn.Parameter(torch.zeros_like(parameter)))
    assert not torch.equal(shared(x)[0], want)
    assert torch.equal(layer(x)[0], want)


def test_buffers_that_are_not_saved_are_known():
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("lost", torch.ones(1), persistent=False)
    assert compat.non_persistent_buffers(module) == {"lost"}


def test_backward_accumulates_and_gives_the_bits_of_torch():
    def made():
        torch.manual_seed(0)
        x = torch.randn(3, requires_grad=True)
        return x, (x * x, x.exp())

    x, outputs = made()
    want, wanted = made()
    seeds = (torch.rand(3), torch.rand(3))
    for _ in range(2):
        compat.run_backward(outputs, seeds, keep_graph=True)
        torch.autograd.backward(wanted, seeds, retain_graph=True)
    assert torch.equal(x.grad, want.grad)


def test_backward_without_keeping_the_graph_frees_it():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    compat.run_backward((y,), (torch.ones(2),))
    with pytest.raises(RuntimeError, match="second time"):
        compat.run_backward((y,), (torch.ones(2),))


def test_what_is_registered_with_pytree_is_found():
    container = compat.registered_container(dict)
    assert container is not None
    children, context = container.flatten({"a": 1})
    assert list(children) == [1]
    assert container.unflatten([2], context) == {"a": 2}
    assert compat.registered_container(Net) is None


def test_a_fake_mode_takes_plain_tensors_and_refuses_questions_about_data():
    with compat.fake_mode():
        y = nn.Linear(2, 3)(torch.empty(4, 2)) + torch.ones(3)
        assert y.shape == (4, 3)
        with pytest.raises(compat.DataDependent):
            bool(y.sum() > 0)
        with compat.no_fake_mode():
            assert type(torch.ones(1)) is torch.Tensor


def test_a_forked_process_runs_backward_after_a_fake_mode_was_used():
    """In a process of its own: what torch starts in this one cannot be undone."""
    code = """
import os, torch
from fxpipe.compat import fake_mode
with fake_mode():
    torch.empty(2).sum()
x = torch.ones(2, requires_grad=True)
x.sum().backward()
pid = os.fork()
if not pid:
    x.sum().backward()
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, env=os.environ)
    assert done.returncode == 7


def test_functions_given_to_fx_wrap_are_made_by_the_caller_while_it_traces():
    original = fx._symbolic_trace._create_wrapped_func
    with compat.wrapped_functions_made_by(lambda function: function):
        assert fx._symbolic_trace._create_wrapped_func(len) is len
    assert fx._symbolic_trace._create_wrapped_func is original


class OddTracer(fx.Tracer):
    def __init__(self, needed):
        super().__init__()


def test_a_graph_that_forgot_its_tracer_can_be_pickled():
    graph = OddTracer(1).trace(nn.ReLU())
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(fx.GraphModule(nn.Module(), copy.deepcopy(graph))))
    compat.forget_tracer(graph)
    again = pickle.loads(pickle.dumps(fx.GraphModule(nn.Module(), graph)))
    assert torch.equal(again(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_gradients_are_switched_by_the_function_that_no_grad_calls():
    with torch.enable_grad():
        compat.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
        compat.set_grad_enabled(True)
        assert torch.is_grad_enabled()


def test_an_autocast_region_is_opened_again_from_its_arguments():
    region = torch.autocast("cpu", torch.float16, cache_enabled=False)
    arguments = compat.autocast_arguments(region)
    assert arguments == ("cpu", torch.float16, True, False)
    entered = compat.enter_autocast(*arguments)
    assert torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.float16
    compat.exit_autocast(entered)
    assert not torch.is_autocast_enabled("cpu")


def test_checkpoint_goes_through_a_generator_that_is_known(monkeypatch):
    called = []

    def generator(*args, **kwargs):
        called.append("before")
        yield
        called.append("after")

    assert compat.CHECKPOINT_GENERATORS
    for name in compat.CHECKPOINT_GENERATORS:
        monkeypatch.setattr(torch.utils.checkpoint, name, generator)
    checkpoint(lambda x: called.append("run"), torch.ones(1), use_reentrant=False)
    assert called == ["before", "run", "after"]


def test_the_dictionaries_of_a_module_are_its_state():
    module = nn.BatchNorm1d(2)
    parameters, buffers = compat.state_of(module)
    assert set(parameters) == {"weight", "bias"}
    assert set(buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    parameters["weight"] = nn.Parameter(torch.zeros(2))
    assert not module.weight.any()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_an_autograd_function_as_a_callable_pickles_and_has_a_gradient():
    function = pickle.loads(pickle.dumps(compat.bound_apply(Double)))
    x = torch.ones(1, requires_grad=True)
    function(x).backward()
    assert x.grad == 2
    assert compat.bound_apply(Double).__self__ is Double


def test_a_dispatch_mode_sees_operators_below_autograd():
    seen = []

    class Mode(compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2))
    assert "aten.mm.default" in seen


def test_attention_kernels_are_chosen_by_a_function_of_this_name():
    assert callable(getattr(torch.nn.attention, compat.ATTENTION_KERNELS))


def test_infinities_that_a_scaler_found_can_be_written():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    found = compat.found_infinities(scaler, optimizer)
    assert [float(v) for v in found.values()] == [0.0]
    for value in found.values():
        value.fill_(1.0)
    scaler.step(optimizer)
    assert parameter == 1  # the step was left out


def test_an_assertion_can_be_traced_and_raises():
    check = compat.assert_

    def forward(x):
        check(x.sum() > 0, "negative")
        return x

    gm = fx.symbolic_trace(forward)
    gm(torch.ones(1))
    with pytest.raises(AssertionError, match="negative"):
        gm(-torch.ones(1))


def test_nodes_of_an_export_carry_annotations():
    class Marked(nn.Module):
        def forward(self, x):
            with compat.nodes_annotated("mark", 3):
                x = x.relu()
            return x + 1

    with compat.annotations_kept():
        program = torch.export.export(Marked(), (torch.ones(2),))
    found = {
        n.name: compat.annotation_of(n, "mark")
        for n in program.graph.nodes
        if n.op == "call_function"
    }
    assert found == {"relu": 3, "add": None}


def test_an_export_inside_its_mode_takes_fakes():
    with compat.export_mode() as mode:
        fake = mode.from_tensor(torch.ones(2))
        program = torch.export.export(nn.ReLU(), (fake,))
    assert [n.op for n in program.graph.nodes] == ["placeholder", "call_function", "output"]


def test_regions_of_an_export_are_operators_that_are_known():
    class Regions(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                x = x * 2
            with torch.autocast("cpu", torch.bfloat16):
                return x @ x

    program = torch.export.export(Regions(), (torch.ones(2, 2),))
    targets = {n.target for n in program.graph.nodes}
    assert set(compat.EXPORTED_REGIONS) <= targets
    assert all(isinstance(o, compat.HigherOrderOperator) for o in compat.EXPORTED_REGIONS)
    assert isinstance(torch.ops.aten.add.Tensor, compat.OpOverload)


def test_an_export_checks_what_it_found_of_the_sizes_in_a_module_of_this_name():
    rows = torch.export.Dim("rows", min=2, max=8)
    program = torch.export.export(nn.ReLU(), (torch.ones(3),), dynamic_shapes=({0: rows},))
    assert hasattr(program.module(), compat.EXPORT_GUARDS)
