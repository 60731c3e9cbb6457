"""Who has the device memory: state leaves it and comes back while its tensors, and the process, stay.

``saver`` is the interface; ``host_saver`` implements it on CPU hosts, where the pages of the tensors are given back to
the system, ``cuda_saver`` on GPUs, with torch_memory_saver; ``saver_for`` picks one. Both keep every tensor's address,
so that views, optimizers and sharding never notice.
"""
