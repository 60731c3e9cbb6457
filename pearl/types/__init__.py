"""Values that all parts of PEARL share: plain, frozen, serialisable; no I/O, no clocks, no torch."""
