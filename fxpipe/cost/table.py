"""The cost of each node, as a table that prints and is saved as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tabulate

from fxpipe.errors import CostError

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class NodeCost:
    """What one node does for one microbatch.

    Args:
        flops: floating-point operations of the forward; a multiply-add is two.
        moved_bytes: read and written by the forward; 0 for a view.
        parameter_bytes: of the parameters it reads. A tied parameter counts at every node.
        output_bytes: of the tensors it returns.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward; 0 where no gradient flows.
        trainable: whether a gradient flows through it, also where that takes no time.
    """

    flops: int = 0
    moved_bytes: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    trainable: bool = False

    def __add__(self, other: NodeCost) -> NodeCost:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return NodeCost(*(a | b if isinstance(a, bool) else a + b for a, b in pairs))


@dataclasses.dataclass(frozen=True)
class CostTable(Mapping[str, NodeCost]):
    """Node name to cost, in graph order.

    >>> table = CostTable({"fc": NodeCost(2000000, 3 * 2**20, 2**20, 2**20, 2e-6, 4e-6)})
    >>> print(table)
    node      MFLOP    moved MiB    parameters MiB    output MiB    forward us    backward us
    ------  -------  -----------  ----------------  ------------  ------------  -------------
    fc            2            3                 1             1             2              4
    total         2            3                 1             1             2              4
    """

    costs: Mapping[str, NodeCost]

    def __getitem__(self, name: str) -> NodeCost:
        return self.costs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.costs)

    def __len__(self) -> int:
        return len(self.costs)

    def total(self, names: Iterable[str] | None = None) -> NodeCost:
        """Sum over the nodes named, or over all."""
        return sum((self.costs[n] for n in (self.costs if names is None else names)), NodeCost())

    def __str__(self) -> str:
        rows = [_row(name, cost) for name, cost in [*self.costs.items(), ("total", self.total())]]
        return tabulate.tabulate(rows, headers="keys", floatfmt=".4g")

    def save(self, path: str | Path) -> None:
        """Writes JSON: ``{"nodes": {name: {field: number}}}``, one line a node."""
        lines = (
            f"  {json.dumps(name)}: {json.dumps(dataclasses.asdict(cost))}"
            for name, cost in self.costs.items()
        )
        text = '{"nodes": {\n' + ",\n".join(lines) + "\n}}\n"
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Reads what `save` wrote; a field that is missing is 0.

        Raises:
            CostError: the file holds something else.
        """
        try:
            nodes = json.loads(Path(path).read_text(encoding="utf-8"))["nodes"]
            return cls({name: NodeCost(**fields) for name, fields in nodes.items()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CostError(
                f"the file holds no cost table: {error}",
                at=str(path),
                hint="write it with CostTable.save",
            ) from error


def _row(name: str, cost: NodeCost) -> dict[str, object]:
    return {
        "node": name,
        "MFLOP": cost.flops / 1e6,
        "moved MiB": cost.moved_bytes / _MIB,
        "parameters MiB": cost.parameter_bytes / _MIB,
        "output MiB": cost.output_bytes / _MIB,
        "forward us": cost.forward_s * 1e6,
        "backward us": cost.backward_s * 1e6,
    }
