"""Ends what has outlived the process group it came from, below a process that adopts orphans."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

from pearl.runtime import process_markers
from pearl.runtime.process_group import ProcessGroup


class Orphans:
    """Of one process that starts groups. ``is_owner`` says that all its descendants are its own; ``spared`` returns the
    pid of a child that belongs to no group and is none."""

    def __init__(self, is_owner: bool, spared: Callable[[], int | None] = lambda: None) -> None:
        self._is_owner = is_owner
        self._spared = spared
        self._stuck: set[int] = set()
        self.survivors: tuple[str, ...] = ()  # who did not end on SIGKILL, in words

    async def end(self, groups: Collection[ProcessGroup]) -> None:
        """Kill the orphans; ``groups`` are those that run, with all that is theirs."""
        if not self._is_owner:
            return
        killed = await process_markers.kill_all(lambda: self._find(groups))
        if killed.survivors:
            self._stuck.update(self._find(groups))
            self.survivors += killed.survivors

    def _find(self, groups: Collection[ProcessGroup]) -> list[int]:
        subreapers = {group.pid for group in groups}
        spared = self._spared()
        found = []
        for child in psutil.Process().children():
            if (
                child.pid == spared
                or child.pid in subreapers
                or child.pid in self._stuck
                or _is_of(child.pid, groups)
            ):
                continue
            if process_markers.is_living(child):
                found.append(child.pid)
            elif None not in subreapers:  # else it may be one whose pid is not known yet
                with suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        return process_markers.with_descendants(found)


def _is_of(pid: int, groups: Collection[ProcessGroup]) -> bool:
    """Return whether it carries the markers of a group that runs: its pid may not be known yet."""
    return any(process_markers.is_marked(pid, group.run_id, group.spec.group) for group in groups)
