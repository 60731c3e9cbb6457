import subprocess
import sys
from pathlib import Path

CODE = """
import psutil, torch
from pearl.workers.allocator import return_large_blocks
assert return_large_blocks()
own = psutil.Process()
before = own.memory_info().rss
torch.ones(6 << 20)  # once freed, glibc by itself would keep blocks of this size
# Freed in turn: what remains lies between the holes.
blocks = [torch.ones(6 << 20) for _ in range(16)]
blocks = blocks[1::2]
print((own.memory_info().rss - before) // len(blocks))
"""


def test_freed_blocks_leave_no_holes() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=root)
    assert int(ran.stdout) < 1.3 * (24 << 20)  # what is in use, not twice as much
