"""A few real models of each library, and what the zoo does with one that cannot be compiled.

Every run is a process of its own that imports a library for seconds and then compiles and runs its
models one after another, each twice.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def run(results: Path, *arguments: str) -> str:
    """What the zoo prints."""
    command = [sys.executable, "examples/benchmarks/model_zoo.py", "--results", str(results)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(results: Path) -> dict[str, dict[str, Any]]:
    return {r["name"]: r for r in map(json.loads, results.read_text().splitlines())}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("library", "models"), [("torchvision", 5), ("transformers", 5), ("timm", 2)]
)
def test_models_of_a_library_compute_the_same_bits_in_a_pipeline(
    library: str, models: int, tmp_path: Path
):
    pytest.importorskip(library)
    run(tmp_path / "results", "--sample", "--library", library)
    found = read(tmp_path / "results")
    assert len(found) == models
    assert {name: r["outcome"] for name, r in found.items()} == dict.fromkeys(found, "bit-equal"), [
        (r["where"], r["traceback"]) for r in found.values()
    ]


def test_a_model_that_cannot_be_captured_is_told_of_with_a_place_and_a_way_out(tmp_path: Path):
    pytest.importorskip("torchvision")
    results, table = tmp_path / "results", tmp_path / "table.md"
    name = "ssdlite320_mobilenet_v3_large"
    chosen = ("--library", "torchvision", "--only", name, "alexnet", "--table", str(table))
    printed = run(results, *chosen)
    found = read(results)
    assert found["alexnet"]["outcome"] == "bit-equal"
    assert found[name]["error"].startswith("TraceError: ")
    for part in ("TraceError: ", "at: ", "hint: "):
        (row,) = [line for line in table.read_text().splitlines() if name in line]
        assert part in row
    assert name in printed
    # what is known is not run again
    assert run(results, *chosen) == ""


def test_a_model_that_takes_too_long_does_not_stop_the_run(tmp_path: Path):
    pytest.importorskip("torchvision")
    chosen = ("--library", "torchvision", "--only", "squeezenet1_0", "squeezenet1_1")
    run(tmp_path / "results", *chosen, "--limit-s", "0.1")
    found = read(tmp_path / "results")
    assert [r["error"] for r in found.values()] == ["took more than 0.1 s"] * 2
