"""What tests and benchmarks of PEARL share: a core on a virtual clock, fake workers, clocks, runs of real processes.

Nothing that runs a job imports it. Live runs need a checkout: they use ``launch/`` and ``tests/checker.py``.
"""
