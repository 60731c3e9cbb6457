"""SGLang as a rollout engine: a server process under this worker, driven over its own HTTP endpoints.

A server rather than an engine inside the worker: when its scheduler dies SGLang ends the process around it, and a
role it cannot switch to needs another process; either way the worker and its links live on. ``server_path`` is put on
the import path of SGLang's processes, ``cpu_path`` only where there is no GPU.
"""
