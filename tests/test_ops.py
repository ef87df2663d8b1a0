import contextlib
import copy
import pickle

import pytest
import torch
from torch import fx

from fxpipe import ops
from fxpipe.compat import fake_mode


def stage_graph():
    """Receives, doubles, sends; what is sent is not read."""
    graph = fx.Graph()
    mb = graph.placeholder("mb")
    args = (mb, [2, 3], torch.float32, torch.device("cpu"), 0, 4)
    received = graph.call_function(ops.recv, args)
    doubled = graph.call_method("mul", (received, 2))
    graph.call_function(ops.send, (doubled, mb, 2, 5))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def run(gm):
    mailbox = ops.Mailbox()
    mailbox.values[4, 1] = torch.ones(2, 3)
    with ops.port(mailbox):
        assert gm(1) == ()
    assert torch.equal(mailbox.values.pop((5, 1)), torch.full((2, 3), 2.0))
    assert not mailbox.values


def test_a_graph_receives_and_sends_through_the_port():
    run(stage_graph())


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda gm: pickle.loads(pickle.dumps(gm)),
        fx.symbolic_trace,
        lambda gm: fx.GraphModule(gm, fx.Tracer().trace(gm)),
    ],
    ids=["copied", "pickled", "traced", "traced by hand"],
)
def test_transfers_survive(again):
    gm = again(stage_graph())
    assert targets(gm) == [ops.recv, ops.send]
    run(gm)


def test_transfers_are_no_dead_code():
    gm = stage_graph()
    gm.graph.eliminate_dead_code()
    gm.recompile()
    run(gm)


def test_fake_tensors_pass_through_without_a_port():
    with fake_mode():
        received = ops.recv(0, [2, 3], torch.float16, torch.device("cpu"), 0, 1)
        assert (received.shape, received.dtype) == ((2, 3), torch.float16)
        assert ops.send(received, 0, 1, 1).shape == (0,)


def test_make_fx_records_transfers():
    from torch.fx.experimental.proxy_tensor import make_fx

    mailbox = ops.Mailbox()
    mailbox.values[4, 1] = torch.ones(2, 3)
    with ops.port(mailbox):
        gm = make_fx(lambda: stage_graph()(1))()
    assert {ops.recv, ops.send} <= set(targets(gm))


def test_a_transfer_outside_of_a_port_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"inside `with fxpipe\.ops\.port"):
        stage_graph()(0)


def test_the_innermost_port_is_used_and_left_also_after_an_error():
    outer, inner = ops.Mailbox(), ops.Mailbox()
    with ops.port(outer):
        with contextlib.suppress(ValueError), ops.port(inner):
            ops.send(torch.ones(1), 0, 1, 7)
            raise ValueError
        ops.send(torch.ones(1), 0, 1, 8)
    assert list(inner.values) == [(7, 0)]
    assert list(outer.values) == [(8, 0)]


def test_no_gradient_flows_through_a_transfer():
    x = torch.ones(2, requires_grad=True)
    with ops.port(ops.Mailbox()):
        sent = ops.send(x, 0, 1, 0)
    with pytest.raises(
        (RuntimeError, UserWarning), match="fxpipe::send: an autograd kernel was not"
    ):
        sent.sum().backward()
