"""Continuous batching over any ``transformers`` causal LM on CPU or CUDA, with paged KV and prefix reuse.

``engine.TorchEngine`` is the protocol with its thread; ``core.EngineCore`` the same work, iteration by iteration;
``scheduler``, ``prefix_cache`` and ``pages`` decide and know no torch; ``runner``, ``attention`` and ``sampler``
compute; ``weights`` takes updates; ``stages``, ``kv_blocks`` and ``kv_pages`` are its part in handing KV over.
"""
