"""KV from prefill to decode workers, directly: one TCP connection an attempt, all in a thread of its own.

``transport.KvTransport`` is the thread with its listener; ``outgoing`` and ``incoming`` are the two sides of one
attempt's conversation over a ``connection``; ``frames`` what they say; ``pages`` what they need of an engine.
Knows neither torch nor the coordinator.
"""
