"""What can go wrong between two peers. All of it is expected; the one who sends decides what it means."""


class PeerGoneError(Exception):
    """The peer is unknown, was lost or was dropped; whether it got the message is not known."""


class QueueFullError(Exception):
    """The peer does not take its messages: the bound of its queue is reached and this message was not sent."""


class RemoteError(Exception):
    """The peer's handler raised instead of answering, or what came is no answer. ``kind`` is the name of the type
    that was raised."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(f"{kind}: {text}" if kind else text)
        self.text = text
        self.kind = kind


class FinalError(Exception):
    """A process cannot do its work, and no later try could."""


class RefusedError(Exception):
    """The coordinator does not let this peer in; the text says why."""


class MalformedError(Exception):
    """What came is not a message of this protocol; the text says what is wrong and where."""


class FrameTooLargeError(ValueError):
    """The message does not fit into a frame; it was not sent."""
