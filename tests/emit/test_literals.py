"""Tables are printed as code that makes them again."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.emit.literals import literal
from fxpipe.errors import FxpipeError
from fxpipe.runtime import script
from fxpipe.runtime.stage import Layout, Receive, TensorLayout

atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda", 1)]),
    st.builds(slice, st.integers(), st.none(), st.integers()),
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.integers(), inner, max_size=4),
        st.builds(Layout, st.just((TensorLayout((2, 3), torch.half, (1, 0)),)), inner),
    ),
)


def read(text):
    return eval(text, {"torch": torch, "script": script})


@settings(max_examples=50, deadline=None)
@given(values, st.integers(0, 12))
def test_a_printed_value_reads_back_equal(value, indent):
    assert read(literal(value, indent)) == value


def test_nan_and_infinity_read_back():
    assert read(literal(math.inf)) == math.inf
    assert math.isnan(read(literal(math.nan)))


def test_fields_with_their_default_are_left_out():
    assert literal(Receive(0, "x", 1)) == 'script.Receive(edge=0, name="x", source=1)'


def test_a_value_that_no_table_may_hold_is_named():
    with pytest.raises(FxpipeError, match="a Generator cannot be written into a script"):
        literal([torch.Generator()])
