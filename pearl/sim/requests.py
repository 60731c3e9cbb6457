"""The request an engine gets, and its progress on that engine."""

from typing import Literal, NamedTuple

from pearl.types.ids import AttemptId
from pearl.types.trajectory import FinishReason

Part = Literal["whole", "prefill", "decode"]
"""How much of a turn is this worker's. A decode part comes with its keys, values and first token; a prefill part
ends with a progress whose ``finish`` is None."""


class Request(NamedTuple):
    attempt: AttemptId
    trajectory: int
    prompt: int
    prompt_tokens: int  # of the group
    context_tokens: int
    make_tokens: int  # that it will generate, at least 1
    finish: FinishReason
    part: Part = "whole"


class Progress(NamedTuple):
    """Tokens that an attempt has made and prefilled here; ``finish`` is None while it runs."""

    request: Request
    made: int
    prefilled_tokens: int
    finish: FinishReason | None


class Sequence:
    """A request on this worker. ``made`` counts up to ``joined``, its first token's boundary."""

    __slots__ = ("end", "joined", "made", "prefilled", "request", "to_prefill")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.made = 0
        self.prefilled = 0
        self.to_prefill = 0
        self.joined = 0  # boundary number
        self.end = -1  # the boundary of its last token, while it decodes

    @property
    def context(self) -> int:
        """Tokens of context when it last joined the batch."""
        return self.request.context_tokens + self.made
