"""A training world without a model: one plain process that takes the seconds it is told to and publishes versions.

``world.EmulatedWorld`` does the commands, ``checkpoints`` remembers steps, ``worker`` is the process. No torch.
"""
