"""Each invariant holds for a graph of the compiler, and names the node that breaks it."""

import pytest
import torch
from torch import nn

from fxpipe import ops
from fxpipe.errors import VerifyError
from fxpipe.ir import verify
from fxpipe.ir.annotations import set_mutates, set_routes, set_stage, set_stage_count
from fxpipe.manager import run_passes
from fxpipe.passes import InsertBoundaries, LowerEdges, ReplicateCheapNodes, RouteEdges
from tests.graphs import passes_up_to, traced


class Net(nn.Module):
    """Two values go from stage 0 to stage 1, one of them on to stage 2."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        a = self.a(x)
        b = torch.tanh(a)
        return self.c(self.b(a) + b) * a


def after(kind):
    gm, _ = run_passes(traced(Net(), torch.randn(2, 4)), passes_up_to(kind, ("b", "c")))
    return gm, {n.name: n for n in gm.graph.nodes}


def broken(check, gm):
    with pytest.raises(VerifyError) as caught:
        check(gm)
    return caught.value


def test_every_node_has_a_value():
    gm, nodes = after(ReplicateCheapNodes)
    verify.values_known(gm)
    del nodes["tanh"].meta["val"]
    error = broken(verify.values_known, gm)
    assert error.problem == "node %tanh has no value"
    assert "test_verify.py" in error.at


def test_every_node_has_a_stage_and_every_stage_a_node():
    gm, nodes = after(ReplicateCheapNodes)
    verify.stages_assigned(gm)
    set_stage_count(gm, 5)
    assert broken(verify.stages_assigned, gm).problem == "stages [3, 4] of 5 hold no node"
    del nodes["tanh"].meta["fxpipe.stage"]
    assert broken(verify.stages_assigned, gm).problem == "node %tanh has no stage"


def test_no_edge_goes_back():
    gm, nodes = after(ReplicateCheapNodes)
    verify.edges_point_forward(gm)
    set_stage(nodes["tanh"], 2)
    error = broken(verify.edges_point_forward, gm)
    assert error.problem == "edge %tanh -> %add goes back from stage 2 to stage 1"
    assert error.hint == "give %add stage 2 or later"


def test_what_crosses_is_one_tensor():
    gm, nodes = after(ReplicateCheapNodes)
    verify.edges_carry_tensors(gm)
    nodes["tanh"].meta["val"] = (nodes["tanh"].meta["val"],) * 2
    error = broken(verify.edges_carry_tensors, gm)
    assert error.problem == "%tanh is a tuple of tensors and is read by stage 1"


def test_every_edge_has_one_route_of_its_own():
    gm, nodes = after(RouteEdges)
    verify.edges_routed(gm)
    routes = nodes["a"].meta["fxpipe.routes"]
    set_routes(nodes["tanh"], ())
    assert broken(verify.edges_routed, gm).problem == "%tanh has 0 routes to stage 1"
    set_routes(nodes["tanh"], routes[:1])
    assert broken(verify.edges_routed, gm).hint == "run route-edges"


def test_values_of_other_stages_are_read_through_one_boundary():
    gm, nodes = after(InsertBoundaries)
    verify.boundaries_inserted(gm)
    nodes["b"].replace_input_with(nodes["a_on_1"], nodes["a"])
    error = broken(verify.boundaries_inserted, gm)
    assert error.problem == "%a of stage 0 is read in stage 1 without a boundary"


def test_tensors_cross_by_a_transfer_alone():
    gm, nodes = after(LowerEdges)
    verify.no_cross_stage_edges(gm)
    nodes["b"].replace_input_with(nodes["recv_a_1"], nodes["a"])
    error = broken(verify.no_cross_stage_edges, gm)
    assert error.problem == "%a of stage 0 is read by stage 1 without a transfer"


def test_receives_keep_the_order_of_the_sends():
    gm, nodes = after(LowerEdges)
    verify.transfers_in_order(gm)
    nodes["recv_tanh_1"].append(nodes["recv_a_1"])
    error = broken(verify.transfers_in_order, gm)
    assert error.problem == "stage 0 sends edges [0, 2] to stage 1, which receives [2, 0]"


def test_a_send_without_a_receive_is_out_of_order():
    gm, nodes = after(LowerEdges)
    nodes["recv_a_2"].replace_all_uses_with(nodes["c"])
    gm.graph.erase_node(nodes["recv_a_2"])
    error = broken(verify.transfers_in_order, gm)
    assert error.problem == "stage 0 sends edges [1] to stage 2, which receives []"


def test_what_was_sent_is_not_written_any_more():
    gm, nodes = after(LowerEdges)
    verify.sent_values_final(gm)
    set_mutates(nodes["tanh"], ("a",))
    error = broken(verify.sent_values_final, gm)
    assert error.problem == "%tanh writes %a in place after it was sent"


def test_the_graph_of_the_tests_sends_what_they_say():
    _, nodes = after(LowerEdges)
    sends = [n.name for n in nodes.values() if n.target is ops.send]
    assert sends == ["send_a_1", "send_a_2", "send_tanh_1", "send_add_2"]
