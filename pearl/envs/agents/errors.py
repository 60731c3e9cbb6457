"""Why a request of an agent is refused. ``code`` is what an endpoint says beside the text."""


class RequestError(Exception):
    """The request cannot be answered; asking again the same way is no use."""

    code = "invalid_request"
    status = 400


class UnsupportedError(RequestError):
    """The request asks for what is not offered; the text names the key and what to do."""

    code = "unsupported_value"


class TruncatedError(RequestError):
    """The trajectory has reached a limit of the job: what the agent does now still counts, but no answer follows."""


class OutOfContextError(TruncatedError):
    """The messages do not fit ``rollout.max_context_tokens``."""

    code = "context_length_exceeded"


class OutOfTurnsError(TruncatedError):
    """``environment.max_turns`` answers have been given."""

    code = "turn_limit_exceeded"


class EditedHistoryError(RequestError):
    """The messages do not go on from the recorded ones. Branches of a trajectory are not built yet."""

    code = "history_edited"


class TrajectoryEndedError(RequestError):
    """The call came after the trajectory's end, or was waiting when it ended."""

    code = "trajectory_ended"
    status = 409
