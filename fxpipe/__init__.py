"""fxpipe: a compiler for pipeline parallelism.

::

    pipe = fxpipe.compile(model, stages=4, loss=loss)
    result = pipe.step(x, target=y)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from fxpipe.errors import FxpipeError

if TYPE_CHECKING:
    from fxpipe.api import compile
    from fxpipe.pipeline import Pipeline
    from fxpipe.session import StepResult
    from fxpipe.verification import verify

__version__ = "0.1.0"

__all__ = ["FxpipeError", "Pipeline", "StepResult", "__version__", "compile", "verify"]

_HOMES: Final = {
    "Pipeline": "fxpipe.pipeline",
    "StepResult": "fxpipe.session",
    "compile": "fxpipe.api",
    "verify": "fxpipe.verification",
}


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: an emitted script imports fxpipe.runtime, and with it this
    # package, but never the compiler.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
