import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# the first backward before the first fake tensor, so that ranks can be forked: see
# tests/test_verification.py
torch.zeros((), requires_grad=True).backward()

TINY = """
import torch
from torch import nn


def make():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    return dict(
        model=model.double(),
        args=(torch.randn(8, 6).double(),),
        target=torch.randn(8, 6).double(),
        loss=nn.functional.mse_loss,
        stages=2,
        microbatches=4,
    )
"""


@pytest.fixture(autouse=True)
def _no_model_file_stays_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[..., str]:
    """``model_file(text)`` writes a model file; by default one of two stages."""

    def write(text: str = TINY, name: str = "tiny.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def tiny(model_file: Callable[..., str]) -> str:
    return model_file()
