import pytest

from fxpipe.cli.main import main


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("microbatches", "bubble"), [("32", "8.6%"), ("8", "27.3%")])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(
    capsys: pytest.CaptureFixture[str], microbatches: str, bubble: str
):
    text = simulated(capsys, "--stages", "4", "--microbatches", microbatches)
    assert f"\nbubble {bubble}, span bubble {bubble}\n" in text
    assert "in flight: rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1" in text


def test_the_grid_is_drawn(capsys: pytest.CaptureFixture[str]):
    text = simulated(
        capsys, "--stages", "2", "--microbatches", "3", "--backward-cost", "1", "--grid"
    )
    assert text.endswith(
        "\n\n"
        "rank 0 | 0F0 0F1 .   0B0 0F2 0B1 .   0B2\n"
        "rank 1 | .   1F0 1B0 1F1 1B1 1F2 1B2 .\n"
        "bubble 25.0%\n"
    )


def test_costs_and_latency_stretch_the_step(capsys: pytest.CaptureFixture[str]):
    sizes = ("--stages", "2", "--microbatches", "2")
    assert "makespan 9\n" in simulated(capsys, *sizes)
    assert "makespan 11\n" in simulated(capsys, *sizes, "--forward-cost", "1,2")
    assert "makespan 10\n" in simulated(capsys, *sizes, "--latency", "0.5")


def test_gpipe_holds_every_microbatch(capsys: pytest.CaptureFixture[str]):
    text = simulated(capsys, "--stages", "2", "--microbatches", "6", "--schedule", "gpipe")
    assert text.startswith("schedule GPipe: 2 stages on 2 ranks, 6 microbatches\n")
    assert "rank 0: 6, rank 1: 6" in text


def test_the_stages_of_a_model_have_its_estimated_costs(
    tiny: str, capsys: pytest.CaptureFixture[str]
):
    text = simulated(capsys, tiny, "--grid")
    assert text.startswith("schedule 1F1B: 2 stages on 2 ranks, 4 microbatches\nmakespan ")
    assert " s\nbubble " in text
    assert "\nrank 0 | 0F0 0F1" in text
    given = simulated(capsys, tiny, "--forward-cost", "1", "--backward-cost", "2")
    assert "makespan 15 s\nbubble 20.0%" in given


def test_what_is_missing_or_in_the_way_is_said(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--microbatches", "4"]) == 2
    assert "hint: pass --stages, or a MODEL" in capsys.readouterr().err
    assert main(["simulate", "--stages", "4", "--leaf-modules", "a"]) == 2
    assert "--leaf-modules needs a model" in capsys.readouterr().err


def test_a_cost_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["simulate", "--stages", "2", "--forward-cost", "fast"])
    assert "'fast' is not a number" in capsys.readouterr().err
