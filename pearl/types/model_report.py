"""What is known of a job's model before anything starts."""

import msgspec


class ModelReport(msgspec.Struct, frozen=True):
    """``remedy``: what else can run this very model, where a problem is one of the engine."""

    architecture: str
    problems: tuple[str, ...] = ()
    remedy: str = ""
