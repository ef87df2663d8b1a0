"""Functions of a script are what torch.fx prints, with imports for what they call."""

import math

import pytest
import torch
from torch import fx, nn

from fxpipe.emit.code import FunctionCode, function_code, import_line, merge_imports
from fxpipe.errors import FxpipeError
from fxpipe.trace import trace


@fx.wrap
def double(x):
    return x * 2


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Third(Half):
    @staticmethod
    def forward(ctx, x):
        return x / 3


class Calls(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        y = y.float().masked_fill(x > 1, -math.inf)
        return Half.apply(double(y)), Third.apply(torch.ones(2, dtype=torch.int64, device=x.device))


def run(code, *arguments):
    """What the function returns, in a module that has no names but those it imports."""
    names = {"torch": torch}
    exec("\n".join([*code.imports, code.text]), names)
    return names[code.name](*arguments)


def test_a_printed_graph_computes_what_the_model_does():
    x = torch.randn(3, 3)
    gm = trace(Calls(), (x,), {}).module
    results = run(function_code(gm.graph, "stage_0"), gm, x)
    for found, expected in zip(results, Calls()(x), strict=True):
        assert torch.equal(found, expected)


def test_the_text_is_that_of_torch_fx_under_another_name():
    gm = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.zeros(1, 2),), {}).module
    printed = gm.graph.python_code("self").src.strip()
    found = function_code(gm.graph, "stage_1").text.strip()
    assert found.splitlines()[0] == "def stage_1(self, input_1):"
    assert found.splitlines()[1:] == printed.splitlines()[1:]


def test_functions_of_one_name_from_two_classes_stay_apart():
    x = torch.randn(3, 3)
    gm = trace(Calls(), (x,), {}).module
    lines = merge_imports([function_code(gm.graph, "stage_0"), function_code(gm.graph, "loss")])
    assert len([line for line in lines if ".Half.apply" in line]) == 1
    assert len([line for line in lines if ".Third.apply" in line]) == 1


def test_imports_come_once_and_in_order():
    functions = [
        FunctionCode("a", "", ("import b", "import a")),
        FunctionCode("b", "", ("import a",)),
    ]
    assert merge_imports(functions) == ["import a", "import b"]


def make_local():
    def local(x):
        return x

    return local


def test_a_function_that_has_no_place_in_a_module_is_refused():
    with pytest.raises(FxpipeError, match=r"make_local\.<locals>\.local cannot be imported"):
        import_line("local", make_local(), at="def stage_0")


def test_a_function_of_the_file_that_is_run_is_refused():
    def main():
        pass

    main.__module__, main.__qualname__ = "__main__", "main"
    with pytest.raises(FxpipeError, match="main cannot be imported by a script"):
        import_line("main", main, at="def stage_0")
