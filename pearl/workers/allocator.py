"""How this process's C library keeps freed host memory."""

import ctypes
import logging
import sys

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 16 << 20
"""What is given back at once must be zeroed by the kernel when it is wanted again: with a threshold of 1 MiB that took
up to a third of a step's time."""
KEPT_BYTES = 64 << 20
"""At the end of the heap."""


def return_large_blocks() -> bool:
    """Give blocks of 16 MiB and more back to the system when they are freed; returns whether the C library can.

    By default glibc comes to keep blocks of up to 32 MiB in its heap, where the activations of a training step leave
    holes as large as the tensors that are in use.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # Setting one of them ends glibc's own adjustment of both.
        is_done = bool(
            mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1 and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) == 1
        )
    except AttributeError:  # not glibc
        is_done = False
    if not is_done:
        log.info(
            "the C library cannot be made to return freed memory: a training step may hold more than it uses"
        )
    return is_done
