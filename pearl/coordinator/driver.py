"""Drives the core in real time: mailbox -> admit -> handle -> journal -> perform, and the ticks it asks for.

Tokens, then journal, are with the OS before a command runs, so a crash at any point leaves a state to resume from.
"""

import asyncio

from pearl.coordinator.admission import Admission
from pearl.coordinator.core import Coordinator
from pearl.coordinator.inbox import Inbox, Item
from pearl.coordinator.performer import CHANGES_TOKENS, Performer
from pearl.coordinator.replay import encode_commands, encode_event
from pearl.coordinator.run_files import RunFiles
from pearl.runtime.clock import Clock
from pearl.runtime.journal import Journal
from pearl.runtime.token_store import TokenStore
from pearl.state.commands import AnyCommand, Finish
from pearl.state.events import AnyEvent, Tick

BATCH_ITEMS = 32
"""Handled, written and performed together: enough to share the writes, a few milliseconds at most."""


class RunClock:
    """Seconds since the run's start, continued over a resume: ``base_s`` is where the former life stopped."""

    def __init__(self, clock: Clock, base_s: float = 0.0) -> None:
        self._clock = clock
        self._start = clock.now() - base_s

    def now(self) -> float:
        return self._clock.now() - self._start


class Driver:
    def __init__(
        self,
        core: Coordinator,
        clock: RunClock,
        inbox: Inbox,
        admission: Admission,
        performer: Performer,
        store: TokenStore,
        journal: Journal,
        files: RunFiles,
    ) -> None:
        self._core = core
        self._clock = clock
        self._inbox = inbox
        self._admission = admission
        self._performer = performer
        self._store = store
        self._journal = journal
        self._files = files
        self._entries: list[tuple[float, bytes, bytes]] = []
        self._commands: list[AnyCommand] = []

    async def run(self) -> Finish:
        """Until the core's Finish. After an OSError (disk full, say) the run must end."""
        while self._performer.finish is None:
            self.handle(await self._inbox.take(self._until_wakeup(), BATCH_ITEMS))
            # The sockets' turn: what is urgent comes in, and is done, between two batches.
            await asyncio.sleep(0)
        return self._performer.finish

    def _until_wakeup(self) -> float | None:
        due = self._core.next_wakeup()
        return None if due is None else max(0.0, due - self._clock.now())

    def handle(self, items: list[Item]) -> None:
        """Take the items in order; their commands are performed on return."""
        for item in items:
            event = self._admission.admit(item)
            if event is not None:
                self._feed(event)
        due = self._core.next_wakeup()
        if due is not None and due <= self._clock.now():
            self._feed(Tick())
        self._commit()

    def _feed(self, event: AnyEvent) -> None:
        now = self._clock.now()
        commands = self._core.handle(event, now)
        self._entries.append((now, encode_event(event), encode_commands(commands)))
        self._commands.extend(commands)
        if any(isinstance(command, CHANGES_TOKENS) for command in commands):
            self._commit()

    def _commit(self) -> None:
        self._store.flush()
        if self._entries:
            self._journal.append(self._entries)
            self._entries.clear()
        commands, self._commands = self._commands, []
        for command in commands:
            self._performer.perform(command)
        self._files.flush()
        if self._journal.wants_snapshot and self._performer.finish is None:
            self._files.mark(self._journal.num_entries, self._clock.now())
            self._journal.roll(self._core.snapshot())
