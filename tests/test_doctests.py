"""Runs every doctest of fxpipe, the passes under the only name they may have."""

import doctest
import importlib
import pkgutil

import pytest

import fxpipe

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(fxpipe.__path__, "fxpipe.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", ["fxpipe", *MODULES])
def test_doctests_hold(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_passes_are_among_the_modules():
    assert "fxpipe.passes" in MODULES
