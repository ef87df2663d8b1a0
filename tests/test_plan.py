import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.schedule.actions import Kind


class Net(nn.Module):
    """A skip edge, a tied weight, and layers of different size."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(self.layers(x)) + x)


def compiled(*, mode=True, **options):
    torch.manual_seed(0)
    ids = torch.zeros(12, 4, dtype=torch.int64)
    model = Net().train(mode)
    cuts = ["layers.2", "norm"]
    return fxpipe.compile(
        model, 3, cuts=cuts, microbatches=4, example_inputs=((ids,), {}), verify=False, **options
    )


def test_the_report_of_a_plan(golden):
    golden(compiled().report())


def test_the_report_of_a_plan_that_never_runs_backward(golden):
    golden(compiled(mode=False).report())


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_grid_of_a_plan(golden, schedule):
    golden(compiled(schedule=schedule).plan.grid())


def test_a_plan_is_data_about_every_stage():
    pipe = compiled()
    plan = pipe.plan
    assert (plan.model, plan.front_end, plan.cuts) == ("Net", "fx", ("layers_2", "norm"))
    assert [s.index for s in plan.stages] == [s.rank for s in plan.stages] == [0, 1, 2]
    assert [s.parameters for s in plan.stages] == [16 * 8 + 8 * 32 + 32, 32 * 8 + 8, 16 + 16 * 8]
    assert [s.parameter_bytes for s in plan.stages] == [4 * s.parameters for s in plan.stages]
    assert [s.modules for s in plan.stages] == [
        ("embed", "layers.1"),
        ("layers.2", "layers.2"),
        ("norm", "head"),
    ]
    assert plan.stages[0].sends == ("embed: f32[3, 4, 8] to 2", "layers_1: f32[3, 4, 32] to 1")
    assert plan.tied == {"embed.weight": (0, 2)}
    assert plan.routes.forward == ((0, 1), (0, 2), (1, 2))
    assert plan.routes.backward == ((1, 0), (2, 0), (2, 1))
    assert all(s.forward_s > 0 and s.backward_s > 0 for s in plan.stages)


def test_the_program_of_the_plan_is_what_runs():
    pipe = compiled(loss=lambda output, target: output.mean())
    with pipe.timed() as timelines:
        pipe.step(torch.zeros(12, 4, dtype=torch.int64))
    ran = [[action for *_, action in rank] for rank in timelines[0].spans]
    compute = (Kind.F, Kind.B)
    assert ran == [[a for a in rank if a.kind in compute] for rank in pipe.plan.program]


def test_a_step_is_simulated_from_the_costs_of_the_stages():
    plan = compiled().plan
    timeline = plan.simulate()
    seconds = [s.forward_s + s.backward_s for s in plan.stages]
    assert 4 * max(seconds) <= timeline.makespan <= 4 * sum(seconds)
    assert list(timeline.peak_in_flight) == [3, 2, 1]


def test_a_plan_that_never_runs_backward_costs_nothing_there():
    assert all(s.backward_s == 0 for s in compiled(mode=False).plan.stages)
