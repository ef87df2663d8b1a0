"""The golden fixture (text in tests/golden/, one file a test), and what every test runs under."""

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

# one thread: results do not depend on the machine, and forked ranks do not fight over cores
torch.set_num_threads(1)

# autograd starts its threads now: a forked rank could not
torch.zeros((), requires_grad=True).backward()

# laws run without a time limit an example: a busy machine is no counterexample
# and with the same examples each time where a failure stops others
settings.register_profile("laws", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("laws")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from this run"
    )


def golden_path(node: pytest.Item) -> Path:
    """tests/passes/test_x.py::test_y[S4] -> tests/golden/passes/test_x/test_y-S4.txt"""
    name = re.sub(r"[^\w.=-]+", "-", node.name).strip("-")
    return GOLDEN / node.path.relative_to(TESTS).with_suffix("") / f"{name}.txt"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """``golden(text)`` passes if text equals the stored file, else shows a unified diff."""

    def check(got: str) -> None:
        __tracebackhide__ = True
        path = golden_path(request.node)
        if got and not got.endswith("\n"):
            got += "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8")
            return
        want = path.read_text(encoding="utf-8") if path.exists() else ""
        if got != want:
            diff = difflib.unified_diff(
                want.splitlines(True),
                got.splitlines(True),
                str(path.relative_to(TESTS)),
                "this run",
            )
            pytest.fail(
                "".join(diff) + "\naccept with: pytest --update-golden",
                pytrace=False,
            )

    return check


def stale_golden_files(items: list[pytest.Item]) -> Iterator[Path]:
    """Golden files that no test reads: of the modules collected, and of modules that are gone."""
    read = {golden_path(item) for item in items}
    collected = {path.parent for path in read}
    for path in sorted(GOLDEN.rglob("*.txt")):
        module = TESTS / path.parent.relative_to(GOLDEN).with_suffix(".py")
        if (path.parent in collected and path not in read) or not module.exists():
            yield path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips device tests where there is no device; stops a run that leaves a stale golden file."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    chosen = (config.option.keyword, config.option.markexpr, getattr(config.option, "lf", False))
    if any(chosen) or any("::" in argument for argument in config.args):
        return
    stale = [str(path.relative_to(TESTS)) for path in stale_golden_files(items)]
    if stale:
        raise pytest.UsageError("golden files no test reads: " + ", ".join(stale))
