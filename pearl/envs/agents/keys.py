"""Keys of the gateway: one an episode, so one a trajectory and try. A key says by itself whether it was ever given out,
so that a late call is told from a stranger's without remembering all keys."""

import hashlib
import hmac
import itertools
import secrets


class Keys:
    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count(1)

    def make(self) -> str:
        return self._signed(next(self._numbers))

    def is_ours(self, key: str) -> bool:
        """Whether it was given out here, in use or not."""
        number = key.removeprefix("pearl-").partition("-")[0]
        is_number = number.isascii() and number.isdigit() and len(number) < 19
        given = key.encode(errors="surrogateescape")  # as it came in the header
        return is_number and hmac.compare_digest(self._signed(int(number)).encode(), given)

    def _signed(self, number: int) -> str:
        mark = hmac.new(self._secret, str(number).encode(), hashlib.blake2b).hexdigest()[:48]
        return f"pearl-{number}-{mark}"
