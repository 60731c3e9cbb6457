"""A flag that says whether something has changed since it was last cleared."""


class ChangeFlag:
    """Marked by whoever writes what the elastic scheduler looks at; not part of a snapshot, so set at first."""

    def __init__(self) -> None:
        self.is_set = True

    def mark(self) -> None:
        self.is_set = True

    def clear(self) -> None:
        self.is_set = False
