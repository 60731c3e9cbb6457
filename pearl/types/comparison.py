"""What came of comparing a part of the run with plain ``transformers``. Crosses the wire and is journalled."""

from typing import Literal

import msgspec

ComparedPart = Literal["training", "rollout"]


class Comparison(msgspec.Struct, frozen=True):
    """Gaps are |log-prob - log-prob by ``transformers``| of the same token, in nats."""

    num_tokens: int = 0
    mean_gap: float = 0.0
    max_gap: float = 0.0
    generated_tokens: int = 0  # by the engine, for this alone
    seconds: float = 0.0
    skipped: str = ""  # why nothing was compared
    error: str = ""  # what is wrong; "" = they agree, or nothing was compared
