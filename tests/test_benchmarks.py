"""The benchmarks run, at sizes that measure nothing."""

import json
import subprocess
import sys
from pathlib import Path

OVERHEAD = Path(__file__).parent.parent / "examples" / "benchmarks" / "overhead.py"
SMALL = "--microbatches 2 --rounds 1 --blocks 2 --width 16 --gpt-microbatches 2 --gpt-rounds 1"


def overhead(*options: str) -> str:
    command = [sys.executable, str(OVERHEAD), *SMALL.split(), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    return run.stdout


def last_column(text: str) -> dict[str, str]:
    """Of the rows of all tables, by the name a row begins with."""
    rows = [line.rsplit("  ", maxsplit=1) for line in text.splitlines() if "  " in line]
    return {name.strip(): value.strip() for name, value in rows}


# 10 s: a process imports torch, and its two ranks compile two models
def test_overhead_prints_the_ratios_to_torch_and_the_figures_behind_them(tmp_path):
    printed = overhead("--json", str(tmp_path / "found.json"))
    ratios = last_column(printed)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 2
    assert set(found["step"]["step_ms"]) == {"fxpipe", "torch.distributed.pipelining"}
    assert len(found["overhead"]["cpu_us_per_microbatch"]["compute alone"]) == 2
    for name in ("overhead", "step"):
        assert ratios[name] == f"{found[name]['ratio']:.3f}"
