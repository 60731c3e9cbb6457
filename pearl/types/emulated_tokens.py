"""The ids that the emulated environment and the emulated engine agree on: no text, but a wish for a length.

The last id of a prompt or an observation says how many tokens the answer to it should have, end token included; the
engine adds its own jitter for each trajectory. Everything else is content without meaning.
"""

PAD_ID = 0
STOP_ID = 1
FIRST_CONTENT_ID = 2
LENGTH_BASE = 1 << 15
"""Id ``LENGTH_BASE + n`` asks for an answer of n tokens; content lies below it."""
MAX_LENGTH = (1 << 15) - 1
VOCABULARY_SIZE = LENGTH_BASE + MAX_LENGTH + 1


def length_id(num_tokens: int) -> int:
    """PendingCalls for an answer of so many tokens, at least one and at most MAX_LENGTH."""
    return LENGTH_BASE + min(max(num_tokens, 1), MAX_LENGTH)
