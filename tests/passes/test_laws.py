"""What holds for every pass and every model: same bits, twice is once, invariants stay true."""

import copy

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from fxpipe.cost.flops import annotate_costs
from fxpipe.ir import verify
from fxpipe.ir.edges import attribute
from fxpipe.ir.text import format_graph
from fxpipe.manager import run_passes
from fxpipe.passes import AssignStages, BalanceStages, default_passes
from tests.graphs import places_to_cut, same_bits, traced
from tests.random_models import RandomModel, batch, recipes

laws = settings(max_examples=40, deadline=None)

# true from some pass on; what the manager checks after each pass alone must stay true
LASTING = (verify.stages_assigned, verify.edges_point_forward, verify.edges_carry_tensors)


@st.composite
def placements(draw):
    """A random model, a batch, and the passes for two to five stages, cut where that is allowed."""
    model, x, training = RandomModel(draw(recipes())), batch(4), draw(st.booleans())
    places = places_to_cut(model, *x, training=training)
    count = min(draw(st.integers(1, 4)), len(places))
    chosen = set(draw(st.permutations(places))[:count])
    cuts = AssignStages(tuple(place for place in places if place in chosen))
    return model, x, default_passes(cuts, training=training)


@laws
@given(placements())
def test_the_graph_gives_the_bits_of_the_model_after_every_pass(placed):
    model, x, passes = placed
    gm = traced(model, *x)
    assert same_bits(model, gm, *x)
    for p in passes:
        gm, _ = run_passes(gm, [p])
        assert same_bits(model, gm, *x), p


@laws
@given(placements())
def test_a_pass_run_twice_is_a_pass_run_once(placed):
    model, x, passes = placed
    gm = traced(model, *x)
    for p in passes:
        gm, _ = run_passes(gm, [p])
        annotate_costs(gm)
        _, again = run_passes(gm, [p])
        assert not again[0].modified, p


@laws
@given(placements())
def test_what_a_pass_ensures_stays_true_until_the_last(placed):
    model, x, passes = placed
    gm, lasting = traced(model, *x), ()
    for p in passes:
        gm, _ = run_passes(gm, [p])
        lasting = LASTING if isinstance(p, AssignStages) else lasting
        for check in lasting:
            check(gm)


@laws
@given(placements())
def test_the_callers_graph_and_parameters_are_left_alone(placed):
    model, x, passes = placed
    given_graph = traced(model, *x)
    text, meta = format_graph(given_graph), copy.copy(given_graph.meta)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    gm, _ = run_passes(given_graph, passes)
    assert format_graph(given_graph) == text
    assert given_graph.meta == meta
    for name, tensor in (*given_graph.named_parameters(), *given_graph.named_buffers()):
        assert attribute(gm, name) is tensor is attribute(model, name)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


@laws
@given(recipes(), st.integers(2, 5), st.sampled_from(["time", "parameters"]))
def test_balanced_stages_stand_only_where_a_cut_may_stand(recipe, stages, by):
    model, x = RandomModel(recipe), batch(4)
    places = places_to_cut(model, *x)
    stages = min(stages, len(places) + 1)
    passes = default_passes(BalanceStages(stages, by=by), training=True)
    gm, _ = run_passes(traced(model, *x), passes)
    assert same_bits(model, gm, *x)
