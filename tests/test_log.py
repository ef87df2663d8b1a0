import logging
from pathlib import Path

import pytest

from fxpipe.log import dump, warn_once

log = logging.getLogger(__name__)


def test_a_warning_comes_once_for_each_text(caplog: pytest.LogCaptureFixture):
    for stage in (0, 1, 0):
        warn_once(log, "stage %d holds no parameters", stage)
    assert caplog.messages == ["stage 0 holds no parameters", "stage 1 holds no parameters"]


def test_a_warning_is_attributed_to_the_line_that_warns(caplog: pytest.LogCaptureFixture):
    warn_once(log, "said here")
    assert caplog.records[0].filename == Path(__file__).name


def test_a_warning_may_hold_a_percent_sign(caplog: pytest.LogCaptureFixture):
    warn_once(log, "the bubble is over 50%")
    assert caplog.messages == ["the bubble is over 50%"]


def test_nothing_is_written_without_a_dump_folder(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("FXPIPE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    dump("00-trace.txt", "text")
    assert not list(tmp_path.iterdir())


def test_the_dump_folder_is_made_and_holds_the_last_text(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FXPIPE_DUMP", str(tmp_path / "new" / "folder"))
    monkeypatch.delenv("RANK", raising=False)
    dump("00-trace.txt", "old")
    dump("00-trace.txt", "new\n\n")
    assert (tmp_path / "new" / "folder" / "00-trace.txt").read_text() == "new\n"


def test_each_rank_of_a_launch_has_its_own_folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("FXPIPE_DUMP", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    dump("code/stage 1.txt", "text")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")] == [
        "rank3/code-stage-1.txt"
    ]
