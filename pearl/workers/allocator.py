"""How this process's C library keeps freed host memory."""

import ctypes
import logging
import sys

log = logging.getLogger(__name__)

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def return_large_blocks() -> bool:
    """Give blocks of 1 MiB and more back to the system when they are freed; returns whether the C library can.

    By default glibc comes to keep blocks of up to 32 MiB in its heap, where the activations of a training step leave
    holes as large as the tensors that are in use.
    """
    if sys.platform != "linux":
        return False
    try:
        is_done = bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1)
    except AttributeError:  # not glibc
        is_done = False
    if not is_done:
        log.info(
            "the C library cannot be made to return freed memory: a training step may hold more than it uses"
        )
    return is_done
