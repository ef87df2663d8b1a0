"""compile, show, run and check on one small model."""

import re

import pytest

from fxpipe.cli.main import main

DRIFTING_LOSS = """
import itertools
import torch
from torch import nn

numbers = itertools.count()


def loss(output, target):
    return nn.functional.mse_loss(output, target) + 1e-3 * next(numbers)


def make():
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return dict(model=model, args=(x,), target=x, loss=loss, stages=2, microbatches=2)
"""

SCALED = """
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, scale):
        return self.second(self.first(x * scale))


def make():
    return dict(model=Scaled(), args=(torch.randn(4, 3), torch.ones(3)), stages=2)
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_compile_prints_the_plan(tiny: str, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "compile", tiny)
    assert text.startswith("Sequential: 2 stages on 2 ranks, traced by fx\n")
    assert "schedule 1F1B, 4 microbatches: predicted bubble" in text


def test_flags_override_what_the_file_says(tiny: str, capsys: pytest.CaptureFixture[str]):
    flags = ("--stages", "3", "--cuts", "1, 3", "--microbatches", "8", "--schedule", "gpipe")
    text = printed(capsys, "compile", tiny, *flags)
    assert "3 stages on 3 ranks" in text
    assert "schedule GPipe, 8 microbatches" in text
    assert re.search(r"1\s+1\s+1\.0 \.\. 2\.1 ", text)


def test_batch_dims_come_from_the_command_line(model_file, capsys: pytest.CaptureFixture[str]):
    path = model_file(SCALED)
    assert main(["compile", path]) == 2
    assert "the inputs do not have the same number of rows" in capsys.readouterr().err
    assert "2 stages" in printed(capsys, "compile", path, "--batch-dims", "scale=none")
    with pytest.raises(SystemExit):
        main(["compile", path, "--batch-dims", "scale"])
    assert "'scale' is not of the form A=1,B=none" in capsys.readouterr().err


def test_emit_names_the_command_that_runs_the_scripts(
    tiny: str, tmp_path, capsys: pytest.CaptureFixture[str]
):
    text = printed(capsys, "compile", tiny, "--emit", str(tmp_path / "build"))
    assert text.endswith(f"\ntorchrun --nproc-per-node 2 {tmp_path / 'build' / 'run.py'}\n")
    assert (tmp_path / "build" / "run.py").is_file()


def test_show_prints_plan_and_schedule(tiny: str, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "show", tiny)
    assert text.startswith("Sequential: 2 stages")
    assert "\n\nrank 0 | 0F0 0F1 " in text


def test_show_prints_the_parts_that_are_asked_for_and_no_other(
    tiny: str, capsys: pytest.CaptureFixture[str]
):
    text = printed(capsys, "show", tiny, "--graph", "1", "--program", "0", "--grid")
    graph, program, grid = text.split("\n\n")
    assert "stage 1\n" in graph
    assert "stage 0\n" not in graph
    assert program.startswith("rank 0: 0RECV_B0 0F0 0SEND_F0 0F1 ")
    assert grid.endswith("bubble 20.0%\n")


def test_show_prints_all_graphs_and_programs_if_none_is_named(
    tiny: str, capsys: pytest.CaptureFixture[str]
):
    text = printed(capsys, "show", tiny, "--graph", "--program")
    assert [line for line in text.splitlines() if line.startswith("stage")] == [
        "stage 0",
        "stage 1",
    ]
    assert re.findall(r"^rank \d: \dRECV_[FB]0", text, re.M) == [
        "rank 0: 0RECV_B0",
        "rank 1: 1RECV_F0",
    ]


def test_show_prints_the_graph_after_each_pass(tiny: str, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "show", tiny, "--passes")
    specs = re.findall(r"^=> ([\w-]+)", text, re.M)
    assert specs[0] == "normalize"
    assert specs.index("route-edges") < specs.index("lower-edges")
    before, after = text.split("=> lower-edges")
    assert "= recv" not in before
    assert "= recv" in after


def test_show_refuses_a_stage_that_is_not_there(tiny: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", tiny, "--graph", "7"]) == 2
    assert capsys.readouterr().err == "there is no stage 7\n  hint: stages are 0 to 1\n"


def test_show_prints_the_script_of_a_rank(tiny: str, capsys: pytest.CaptureFixture[str]):
    assert "import" in printed(capsys, "show", tiny, "--code", "1")


def test_run_trains(tiny: str, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "run", tiny, "--steps", "3", "--lr", "0.5")
    losses = [float(line.split()[3]) for line in text.splitlines()]
    assert [line.split()[:3] for line in text.splitlines()] == [
        ["step", str(step), "loss"] for step in (1, 2, 3)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[2]


def test_run_clips_the_gradients(tiny: str, capsys: pytest.CaptureFixture[str]):
    free = printed(capsys, "run", tiny, "--steps", "2", "--lr", "0.5")
    clipped = printed(capsys, "run", tiny, "--steps", "2", "--lr", "0.5", "--clip-norm", "1e-6")
    first, second = clipped.splitlines()
    assert " norm 0." in first
    assert first.split()[3] == free.split()[3]
    assert first.split()[3] == second.split()[3]


def test_check_prints_the_table(tiny: str, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "check", tiny, "--microbatches", "3", "--schedule", "GPipe")
    assert text.endswith("\n10 of 10 equal bit for bit\n")


def test_check_ends_with_1_if_a_number_differs(model_file, capsys: pytest.CaptureFixture[str]):
    assert main(["check", model_file(DRIFTING_LOSS)]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^loss +loss +f32\[\] +differ ", text, re.M)
    assert "6 of 7 equal bit for bit" not in text
    assert "5 of 6 equal bit for bit, largest difference 0.002 in loss loss" in text


def test_check_accepts_a_difference_within_the_tolerance(model_file):
    assert main(["check", model_file(DRIFTING_LOSS), "--tol", "0.01"]) == 0
