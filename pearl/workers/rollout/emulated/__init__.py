"""An engine without a model: continuous batching in real time by a timing model, tens of MB a process, no torch.

``engine.EmulatedEngine`` is the protocol on a clock; ``core.EmulatedCore`` what it does, pass by pass, without one;
``cache`` and ``request`` account for KV; ``weights`` takes updates; ``worker`` is the process.
"""
