"""Identifiers. All are small integers so that they are cheap on the wire and stable in a journal.

A training trajectory's id is ``prompt * group_size + member``: it names the same episode of the same
prompt in every run with the same seed, which is what counter-based sampling is keyed by.
"""

from typing import NewType

Slot = NewType("Slot", int)
"""Stable number of a rollout worker; never renumbered, reused only under a new incarnation."""
Incarnation = NewType("Incarnation", int)
"""Counts the lives of a slot or of the training world, from 1."""
OpId = NewType("OpId", int)
"""Id of a command; its outcome echoes it. Ids grow and are never reused within a journal."""
AttemptId = NewType("AttemptId", int)
"""One try to generate one turn (or the rest of it) on one worker; unique, shares OpId's counter."""
TrajectoryId = NewType("TrajectoryId", int)
PromptId = NewType("PromptId", int)
"""Serial number of a prompt in the order in which prompts are trained, from 0."""
GpuId = NewType("GpuId", str)
"""``host/index``: a physical GPU, or a virtual one on a CPU host."""

EVALUATION_BASE = 1 << 40
"""Trajectory ids from here on belong to evaluations, so that they can never meet a training id."""
EVALUATION_STRIDE = 1 << 32
"""Evaluation round r, task i has the id ``EVALUATION_BASE + r * EVALUATION_STRIDE + i``."""
