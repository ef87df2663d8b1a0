"""Estimates what each node of a graph costs, from its shapes and one run on fake values.

A node takes the larger of two times: its FLOPs over the rate of the device, and the bytes it moves
over the bandwidth. FLOPs alone would miss everything elementwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from fxpipe import compat
from fxpipe.cost.device import CPU, H100, Device
from fxpipe.cost.fake_run import FakeRunner, Run, can_have_gradient, name_of_call
from fxpipe.cost.formulas import missing_formulas
from fxpipe.cost.table import CostTable, NodeCost
from fxpipe.errors import CostError
from fxpipe.ir.annotations import set_cost, value_of
from fxpipe.ir.values import tensors_in

_REGION_SWITCHES = (compat.set_grad_enabled, compat.enter_autocast, compat.exit_autocast)

_GATHERS = frozenset(
    {"Embedding", "EmbeddingBag", "embedding", "embedding_bag", "gather", "getitem", "index_select"}
)
"""Calls that read the rows they pick, not all that they are given."""


def annotate_costs(gm: fx.GraphModule, device: Device | None = None) -> CostTable:
    """Writes the cost of each node into the graph, where passes read it, and returns the table."""
    table = node_costs(gm, device)
    for node in gm.graph.nodes:
        set_cost(node, table[node.name])
    return table


def node_costs(gm: fx.GraphModule, device: Device | None = None) -> CostTable:
    """The cost of each node for the microbatch that its values were traced with.

    No parameter, buffer, value or attribute of `gm` is changed, and no random number is drawn.
    A node that cannot be run on fake values costs the bytes it moves.

    Args:
        gm: its nodes have fake values.
        device: None: `H100` if a value is on CUDA, else `CPU`.

    Raises:
        CostError: the values are not fake.
    """
    tensors = [t for node in gm.graph.nodes for t in tensors_in(value_of(node))]
    if not tensors:
        return CostTable({node.name: NodeCost() for node in gm.graph.nodes})
    mode = getattr(tensors[0], "fake_mode", None)
    if mode is None:
        raise CostError(
            "costs are estimated on fake values, but the values of the graph are real",
            hint="annotate the graph with fake values, as the tracer does",
        )
    if device is None:
        device = H100 if any(t.is_cuda for t in tensors) else CPU
    counter = FlopCounterMode(display=False, custom_mapping=missing_formulas())
    # enable_grad also ends a region without gradients that the graph leaves open
    with mode, torch.enable_grad(), counter:
        runner = FakeRunner(gm, mode, counter)
        return CostTable({n.name: _node_cost(n, runner, device) for n in gm.graph.nodes})


def _node_cost(node: fx.Node, runner: FakeRunner, device: Device) -> NodeCost:
    if node.op == "output":
        return NodeCost()
    outputs = list(tensors_in(value_of(node)))
    if node.op in ("placeholder", "get_attr"):
        return NodeCost(output_bytes=_bytes(outputs), trainable=runner.start(node))
    if node.target in _REGION_SWITCHES:
        runner.switch_region(node)
        return NodeCost()
    inputs = [t for n in node.all_input_nodes for t in tensors_in(value_of(n))]
    if not inputs and not outputs:
        runner.grad[node] = False
        return NodeCost()
    run = runner.run(node)
    module = runner.module(node)
    state = [] if module is None else [*module.parameters(), *module.buffers()]
    forward_bytes, backward_bytes = _moved_bytes(node, run, [*inputs, *state], outputs)
    backward_flops = run.flops * _gradients(node, runner)
    return NodeCost(
        flops=run.flops,
        moved_bytes=forward_bytes,
        parameter_bytes=_bytes(runner.parameters(node)),
        output_bytes=_bytes(outputs),
        forward_s=device.seconds(run.flops, forward_bytes),
        backward_s=device.seconds(backward_flops, backward_bytes) if run.grad else 0.0,
        trainable=run.grad,
    )


def _moved_bytes(
    node: fx.Node, run: Run, inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[int, int]:
    """Bytes that the forward and the backward read and write."""
    if run.view:
        return 0, 0
    touched = _bytes(inputs) + _bytes(outputs)
    if name_of_call(node) in _GATHERS:
        # the gradient of what was picked from is as large as what was picked from
        index = _bytes(t for t in inputs if not can_have_gradient(t))
        return index + 2 * _bytes(outputs), touched
    return touched, 2 * touched


def _gradients(node: fx.Node, runner: FakeRunner) -> int:
    """How often a backward takes the FLOPs of the forward: once for each factor of a product.

    Vectors do not count: the gradient of a bias is a sum.
    """
    module = runner.module(node)
    held = [] if module is None else module.parameters()
    wanted: list[Tensor] = [p for p in held if p.requires_grad]
    wanted += [t for n in node.all_input_nodes if runner.grad[n] for t in tensors_in(value_of(n))]
    return min(2, max(1, sum(t.dim() >= 2 for t in wanted)))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(int(t.numel()) * t.element_size() for t in tensors)
