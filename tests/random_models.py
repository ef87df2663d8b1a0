"""Random small models for the laws: a list of operations, drawn by hypothesis, runs as a module."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4

Kind = tuple[str, int]
"""What a value is, and its width: ``f`` float, ``b`` bool, ``i`` int without width, ``s`` 0-dim."""


class Op(NamedTuple):
    """One operation of a recipe.

    Args:
        takes: one letter an operand: a kind, or ``=`` for a float as wide as the first operand.
        gives: kinds of the results, from the width of the first operand and the step's size.
        run: the module the operation made for itself, if any, its size, and its operands.
        make: that module.
        safe: the operation that does the same out of place.
    """

    takes: str
    gives: Callable[[int, int], list[Kind]]
    run: Callable[..., Any]
    make: Callable[[int, int], nn.Module] | None = None
    safe: str = ""


def _same(width: int, size: int) -> list[Kind]:
    return [("f", width)]


def _sized(width: int, size: int) -> list[Kind]:
    return [("f", size)]


def _set_column(module: None, size: int, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = y[:, 0]
    return x


def _set_column_(module: None, size: int, x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] = y[:, 0]
    return x


def _checkpointed(module: nn.Module, size: int, x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.tanh(module(x)) * 2, x, use_reentrant=False)


def _without_gradient(module: None, size: int, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
        return y + 1


def _swap_halves(module: None, size: int, x: Tensor) -> Tensor:
    return x.view(x.size(0), -1, 2).transpose(1, 2).reshape(x.size(0), -1)


class Counter(nn.Module):
    """Adds a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


OPS: dict[str, Op] = {
    "linear": Op("f", _sized, lambda m, n, x: m(x), nn.Linear),
    "again": Op("f", _sized, lambda m, n, x: m(x), nn.Linear),
    "tied": Op("f", _sized, lambda m, n, x: m(x), nn.Linear),
    "norm": Op("f", _same, lambda m, n, x: m(x), lambda w, n: nn.BatchNorm1d(w)),
    "counter": Op("f", _same, lambda m, n, x: m(x), lambda w, n: Counter()),
    "relu_layer": Op("f", _same, lambda m, n, x: m(x), lambda w, n: nn.ReLU()),
    "relu_layer_": Op(
        "f", _same, lambda m, n, x: m(x), lambda w, n: nn.ReLU(inplace=True), "relu_layer"
    ),
    "tanh": Op("f", _same, lambda m, n, x: torch.tanh(x)),
    "relu": Op("f", _same, lambda m, n, x: torch.relu(x)),
    "relu_": Op("f", _same, lambda m, n, x: torch.relu_(x), None, "relu"),
    "add": Op("f=", _same, lambda m, n, x, y: x + y),
    "add_": Op("f=", _same, lambda m, n, x, y: x.add_(y), None, "add"),
    "scale": Op("f", _same, lambda m, n, x: x * 0.5),
    "scale_": Op("f", _same, lambda m, n, x: x.mul_(0.5), None, "scale"),
    "mul": Op("f=", _same, lambda m, n, x, y: torch.mul(x, other=y)),
    "set_column": Op("f=", _same, _set_column),
    "set_column_": Op("f=", _same, _set_column_, None, "set_column"),
    "checkpointed": Op("f", _sized, _checkpointed, nn.Linear),
    "dropout": Op("f", _same, lambda m, n, x: nn.functional.dropout(x, 0.5, training=True)),
    "spread": Op("f", _same, lambda m, n, x: x[:, :1].expand(-1, x.size(1))),
    "cat": Op("f=", lambda w, n: [("f", 2 * w)], lambda m, n, x, y: torch.cat([x, y], dim=1)),
    "chunk": Op(
        "f", lambda w, n: [("f", w // 2), ("f", w // 2)], lambda m, n, x: x.chunk(2, dim=1)
    ),
    "narrow": Op("f", lambda w, n: [("f", w // 2)], lambda m, n, x: x[:, : x.size(1) // 2]),
    "swap_halves": Op("f", _same, _swap_halves),
    "transpose": Op("f", _same, lambda m, n, x: x.t().tanh().t()),
    "by_rows": Op("ff", _same, lambda m, n, x, y: x / y.size(0)),
    "detach": Op("f", _same, lambda m, n, x: x.detach()),
    "no_grad": Op("f", _same, _without_gradient),
    "positive": Op("f", lambda w, n: [("b", w)], lambda m, n, x: x > 0),
    "where": Op("fb=", _same, lambda m, n, x, mask, y: torch.where(mask, x, y)),
    "fill": Op("fb", _same, lambda m, n, x, mask: x.masked_fill(mask, 0.25)),
    "fill_": Op("fb", _same, lambda m, n, x, mask: x.masked_fill_(mask, 0.25), None, "fill"),
    "argmax": Op("f", lambda w, n: [("i", WIDTH)], lambda m, n, x: x.argmax(1) % WIDTH),
    "embed": Op("i", _sized, lambda m, n, i: m(i), lambda w, n: nn.Embedding(WIDTH, n)),
    "mean": Op("f", lambda w, n: [("s", 0)], lambda m, n, x: x.mean()),
    "shift": Op("fs", _same, lambda m, n, x, s: x - s),
}  # fmt: skip


class Step(NamedTuple):
    """An operation, what it reads by index, and the width of its result where it chooses one."""

    op: str
    operands: tuple[int, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model as data.

    Args:
        steps: in order; values 0 and 1 are the inputs, each step adds its results.
        outputs: the floats that are returned.
        structure: how: ``tensor``, ``tuple`` or ``dict``.
        frozen: every n-th parameter is frozen; 0: none.
    """

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    structure: str
    frozen: int


class RandomModel(nn.Module):
    """Runs a recipe. A head at the end always trains."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipe
        kinds = list(kinds_of(recipe.steps))
        linears: dict[tuple[int, int], nn.Linear] = {}
        for i, step in enumerate(recipe.steps):
            op, width = OPS[step.op], kinds[step.operands[0]][1]
            if op.make is not None:
                module = op.make(width, step.size)
                earlier = linears.get((width, step.size))
                if step.op == "again" and earlier is not None:
                    module = earlier
                if step.op == "tied" and earlier is not None:
                    module.weight = earlier.weight
                if isinstance(module, nn.Linear):
                    linears[width, step.size] = module
                self.add_module(f"{step.op}{i}", module)
        self.head = nn.Linear(kinds[recipe.outputs[0]][1], 1)
        self.double()
        for i, parameter in enumerate(self.parameters()):
            if recipe.frozen and i % recipe.frozen == 0:
                parameter.requires_grad_(False)
        self.head.requires_grad_(True)

    def __repr__(self) -> str:
        return f"RandomModel({self.recipe})"

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        values: list[Any] = [x, ids]
        for i, step in enumerate(self.recipe.steps):
            module = getattr(self, f"{step.op}{i}", None)
            result = OPS[step.op].run(module, step.size, *[values[j] for j in step.operands])
            values += result if isinstance(result, (tuple, list)) else [result]
        first, *others = [values[i] for i in self.recipe.outputs]
        found = (self.head(first), *others)
        if self.recipe.structure == "dict":
            return {f"out{i}": value for i, value in enumerate(found)}
        return found if self.recipe.structure == "tuple" else found[0]


INPUTS: list[Kind] = [("f", WIDTH), ("i", WIDTH)]


def kinds_of(steps: tuple[Step, ...]) -> list[Kind]:
    """Kinds of all values of a recipe."""
    kinds = list(INPUTS)
    for step in steps:
        kinds += OPS[step.op].gives(kinds[step.operands[0]][1], step.size)
    return kinds


@st.composite
def recipes(draw: st.DrawFn, max_steps: int = 10) -> Recipe:
    """Recipes whose models run, forward and backward."""
    steps: list[Step] = []
    kinds = list(INPUTS)
    for _ in range(draw(st.integers(2, max_steps))):
        name = draw(st.sampled_from(sorted(OPS)))
        operands = _draw_operands(draw, OPS[name].takes, kinds)
        if operands is None:
            name, operands = "linear", (len(kinds) - 1,)
            if kinds[-1][0] != "f":
                operands = (0,)
        width = kinds[operands[0]][1]
        if width % 4 and name in ("chunk", "swap_halves", "narrow"):
            name = "tanh"
        step = Step(name, operands, draw(st.sampled_from([4, 8])))
        steps.append(step)
        kinds += OPS[name].gives(width, step.size)
    floats = [i for i, (kind, _) in enumerate(kinds) if kind == "f"]
    others = draw(st.lists(st.sampled_from(floats), max_size=2))
    outputs = tuple(dict.fromkeys([floats[-1], *others]))
    structure = draw(st.sampled_from(["tensor", "tuple", "dict"]))
    return runnable(Recipe(tuple(steps), outputs, structure, draw(st.integers(0, 4))))


def _draw_operands(draw: st.DrawFn, takes: str, kinds: list[Kind]) -> tuple[int, ...] | None:
    operands: list[int] = []
    for letter in takes:
        wanted = "f" if letter == "=" else letter
        found = [i for i, (kind, _) in enumerate(kinds) if kind == wanted]
        if operands and letter in "=b":
            found = [i for i in found if kinds[i][1] == kinds[operands[0]][1]]
        if not found:
            return None
        operands.append(draw(st.sampled_from(found[::-1])))
    return tuple(operands)


def runnable(recipe: Recipe) -> Recipe:
    """The recipe with as few writes in place undone, last first, as autograd asks for."""
    while not _runs(recipe):
        unsafe = [i for i, step in enumerate(recipe.steps) if OPS[step.op].safe]
        last = unsafe[-1]
        safe = recipe.steps[last]._replace(op=OPS[recipe.steps[last].op].safe)
        steps = (*recipe.steps[:last], safe, *recipe.steps[last + 1 :])
        recipe = dataclasses.replace(recipe, steps=steps)
    return recipe


def _runs(recipe: Recipe) -> bool:
    try:
        loss(RandomModel(recipe)(*batch(3)), target(3)).backward()
    except RuntimeError as error:
        refused = ("inplace", "in-place", "single memory location")
        if any(words in str(error) for words in refused):
            return False
        raise
    return True


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """A batch, always the same."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.arange(rows) % WIDTH


def target(rows: int) -> Tensor:
    """What the outputs for the batch should be."""
    return batch(rows)[0][:, :1] + 1


def loss(output: Any, target: Tensor) -> Tensor:
    """A loss that reads all outputs."""
    if isinstance(output, Tensor):
        output = (output,)
    leaves = output.values() if isinstance(output, dict) else output
    total = target.new_zeros(())
    for value in leaves:
        total = total + (value - target).square().mean()
    return total
