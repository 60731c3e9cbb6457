"""A process for tests that starts one process group and then waits: what a killed agent leaves behind.

``python -m lone_launcher SPEC_JSON RUN_ID``
"""

import sys

import msgspec
import uvloop

from pearl.runtime.process_group import ProcessGroup
from pearl.types.messages.control import StartGroup


async def main(spec: bytes, run_id: str) -> None:
    group = ProcessGroup(msgspec.json.decode(spec, type=StartGroup), run_id)
    await group.start()
    await group.wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1].encode(), sys.argv[2]))
