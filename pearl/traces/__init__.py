"""Traces of preemptible capacity: recorded ones and hand-written ones, read into ``TraceEvent`` values."""

from pearl.traces.capacity import at_most, counts
from pearl.traces.reading import load_trace, read_trace
from pearl.traces.source import Trace, TraceError

__all__ = ["Trace", "TraceError", "at_most", "counts", "load_trace", "read_trace"]
