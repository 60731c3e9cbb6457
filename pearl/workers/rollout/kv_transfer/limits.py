"""How long each step of a handing over may take, and how many bytes may be on the way."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvLimits:
    connect_s: float = 3.0
    contact_s: float = 10.0
    """The prefill stage has reached the decode worker and both stages are there. They are sent at the same time; a
    death in between is noticed by the coordinator sooner, so this is for what nobody else sees."""
    silence_s: float = 5.0
    """A peer that was met and has said nothing for longer is gone: both sides speak at least every ``ping_s``."""
    ping_s: float = 1.0
    chunk_s: float = 4.0
    """One chunk from its first byte to its last."""
    wait_s: float = 120.0
    """Nothing has moved: the prefill stage waits for its turn, or the decode worker for free pages."""
    engine_s: float = 60.0
    """The worker's own engine has answered; it does so between two iterations."""
    farewell_s: float = 1.0
    """Last words are out and heard."""
    chunk_bytes: int = 8 << 20
    """At most so much in one chunk, unless one token alone is larger."""
    window_bytes: int = 32 << 20
    """Staged in host memory at once for or from one peer."""
    max_strangers: int = 256
    """Connections whose decode stage is not there; more are closed at once."""
