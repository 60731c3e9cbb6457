"""Traces of preemptible capacity: recorded ones and hand-written ones, read into ``TraceEvent`` values."""

from pearl.traces.capacity import at_most, counts
from pearl.traces.reading import read_trace
from pearl.traces.source import TraceError

__all__ = ["TraceError", "at_most", "counts", "read_trace"]
