"""From a model to a graph: tracing with fake values, its guards, and how batches bind to it."""

from fxpipe.trace.front_ends import trace
from fxpipe.trace.guards import Guard
from fxpipe.trace.inputs import BoundInputs, InputBinder, InputSpec, Placeholder
from fxpipe.trace.traced import Traced

__all__ = ["BoundInputs", "Guard", "InputBinder", "InputSpec", "Placeholder", "Traced", "trace"]
