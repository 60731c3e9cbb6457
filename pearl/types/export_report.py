"""What an export says when it has ended."""

import msgspec


class ExportReport(msgspec.Struct, frozen=True):
    """``problem`` is empty when the directory is whole."""

    problem: str = ""
    step: int = -1
    num_tensors: int = 0
    num_bytes: int = 0  # of all files
    notes: tuple[str, ...] = ()
