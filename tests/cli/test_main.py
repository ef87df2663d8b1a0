import dataclasses
import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from fxpipe.cli.flags import OF_A_MODEL, SIZES
from fxpipe.cli.main import main
from fxpipe.options import CompileOptions
from tests.ranks import run_ranks

COMMANDS = ("compile", "show", "simulate", "run", "check")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    _, example = capsys.readouterr().out.split("example:\n")
    assert f"fxpipe {command} " in example


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {command}" in text for command in COMMANDS)


def test_every_option_of_compile_has_a_flag_or_is_a_function():
    fields = {field.name for field in dataclasses.fields(CompileOptions)}
    assert {*SIZES, *OF_A_MODEL} == fields - {"loss", "init"}


def test_an_error_prints_its_lines_without_a_traceback(
    tiny: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["compile", tiny, "--stages", "2", "--cuts", "1,2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "2 stages need 1 cuts, 2 are given\n  at: stages=2, cuts=('1', '2')\n  hint: use stages=3\n"
    )


def test_the_traceback_is_printed_on_demand(tiny: str, capsys: pytest.CaptureFixture[str]):
    assert main(["compile", tiny, "--schedule", "none", "--traceback"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):")
    assert "no schedule is named 'none'" in error


def test_an_error_of_the_model_file_keeps_its_traceback(model_file):
    with pytest.raises(ZeroDivisionError):
        main(["compile", model_file("def make(): 1 / 0"), "--stages", "2"])


def test_stages_must_come_from_somewhere(model_file, capsys: pytest.CaptureFixture[str]):
    path = model_file("import torch\ndef make(): return dict(model=torch.nn.Identity())")
    assert main(["compile", path]) == 2
    assert "pass --stages, or let make() return stages" in capsys.readouterr().err


def test_only_one_rank_prints_a_ranks_error(
    monkeypatch: pytest.MonkeyPatch, model_file, capsys: pytest.CaptureFixture[str]
):
    path = model_file(
        "import torch\n"
        "def loss(y, t): raise ValueError('bad loss')\n"
        "def make():\n"
        "    x = torch.ones(4, 2)\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
        "    return dict(model=model, args=(x,), target=x, loss=loss, stages=2)\n"
    )
    assert main(["run", path, "--transport", "local"]) == 2
    assert "bad loss" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["run", path, "--transport", "local"]) == 2
    assert capsys.readouterr().err == ""


def test_ranks_check_together_and_one_prints(tiny: str, tmp_path):
    def run(rank: int) -> int:
        sys.stdout = (tmp_path / f"out{rank}").open("w")
        status = main(["check", tiny])
        sys.stdout.close()
        return status

    assert run_ranks(2, run) == [0, 0]
    assert "10 of 10 equal bit for bit" in (tmp_path / "out0").read_text()
    assert (tmp_path / "out1").read_text() == ""


def test_ranks_that_torchrun_starts_join_and_leave_one_another(tiny: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> tuple[int, bool]:
        world = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
        return main(["run", tiny, "--steps", "1"]), dist.is_initialized()

    assert run_ranks(2, run, init=False) == [(0, False), (0, False)]


def test_the_module_runs_as_a_program():
    result = subprocess.run(
        [sys.executable, "-m", "fxpipe", "simulate", "--stages", "4", "--microbatches", "32"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "bubble 8.6%" in result.stdout
