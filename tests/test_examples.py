"""Each example runs as its reader would start it, with sizes that take seconds.

Every run is a process of its own, and most of its time is the import of torch and torchvision.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY_GPT = ("--steps", "4", "--width", "32", "--rows", "8", "--length", "32", "--microbatches", "4")
TINY_VISION = ("--epochs", "1", "--images", "50", "--size", "8", "--rows", "20")


def run(name: str, *arguments: str, processes: int | None = None) -> str:
    """What the example prints; under torchrun if `processes` are given."""
    # --standalone: a free port, so that runs side by side do not meet
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    command = [sys.executable, *(torchrun if processes else ()), f"examples/{name}.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step +\d+ +loss (\S+)", printed, re.MULTILINE)]


@pytest.fixture(scope="module")
def gpt_in_one_process() -> str:
    return run("train_gpt", *TINY_GPT)


def test_the_gpt_learns_and_says_how_idle_its_ranks_were(gpt_in_one_process: str):
    found = losses(gpt_in_one_process)
    assert len(found) == 4
    assert found[-1] < found[0] - 0.05
    assert "GPT: 4 stages on 4 ranks" in gpt_in_one_process
    assert re.search(r"bubble: predicted \d+\.\d%, measured \d+\.\d%\n", gpt_in_one_process)


def test_two_processes_train_the_gpt_that_one_process_trains(gpt_in_one_process: str):
    printed = run("train_gpt", *TINY_GPT, processes=2)
    assert "GPT: 2 stages on 2 ranks" in printed
    # the norm that clips is summed by stage: equal up to rounding
    assert losses(printed) == pytest.approx(losses(gpt_in_one_process), abs=2e-3)


@pytest.mark.parametrize("processes", [None, 2])
def test_the_pipelined_resnet_is_the_one_of_the_plain_loop(processes: int | None):
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    printed = run("train_vision", *TINY_VISION, processes=processes)
    pipeline, plain = re.findall(r"accuracy (\S+)%", printed)
    assert pipeline == plain
    assert re.search(r"differ in any bit: 0 of \d+\n", printed)


def test_every_example_is_run_here_and_told_of_in_the_readme():
    examples = {path.stem for path in ROOT.glob("examples/*.py")}
    assert examples == {"train_gpt", "train_vision"}
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert all(f"examples/{name}.py" in readme for name in examples)
