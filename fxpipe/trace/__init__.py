"""From a model to a graph: fx tracing with fake values, and how batches bind to the graph."""

from fxpipe.trace.front_ends import trace
from fxpipe.trace.inputs import BoundInputs, InputBinder, InputSpec, Placeholder
from fxpipe.trace.traced import Traced

__all__ = ["BoundInputs", "InputBinder", "InputSpec", "Placeholder", "Traced", "trace"]
