"""What can go wrong when memory changes hands. Imports nothing."""


class ResidencyError(Exception):
    """Memory was not handed over; the message says what is held, what was expected and what can be done."""


class NotFreedError(ResidencyError):
    """A release did its work, and the memory is still taken."""


class NoRoomError(ResidencyError):
    """There is no memory to come back to yet. Nothing was changed; a later try may succeed."""


class StateChangedError(ResidencyError):
    """What came back is not what left. Nothing may be done with it."""
