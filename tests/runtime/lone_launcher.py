"""A process for tests that starts process groups, as an agent does, and waits for them.

``python -m lone_launcher SPEC_JSON RUN_ID [SPEC_JSON]``
"""

import asyncio
import sys

import msgspec
import uvloop

from pearl.runtime.orphans import Orphans
from pearl.runtime.process_group import ProcessGroup
from pearl.runtime.subreaper import adopt_orphans
from pearl.types.messages.control import StartGroup


async def main(run_id: str, *specs: str) -> None:
    groups = [ProcessGroup(msgspec.json.decode(spec, type=StartGroup), run_id) for spec in specs]
    orphans = Orphans(adopt_orphans())

    async def keep(group: ProcessGroup) -> None:
        await group.start()
        await group.wait()
        groups.remove(group)
        await orphans.end(groups)

    async with asyncio.TaskGroup() as tasks:
        for group in list(groups):
            tasks.create_task(keep(group))


if __name__ == "__main__":
    first, run_id, *others = sys.argv[1:]
    uvloop.run(main(run_id, first, *others))
