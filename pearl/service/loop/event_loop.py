"""Drives the core in real time: mailbox -> admit -> handle -> journal -> perform, and the ticks it asks for.

Tokens, then journal, are with the OS before a command runs, so a crash at any point leaves a state to resume from.
"""

import asyncio

from pearl.core.coordinator import Coordinator
from pearl.runtime.clock import Clock
from pearl.runtime.journal import Journal
from pearl.runtime.token_store import TokenStore
from pearl.service.loop.command_executor import CHANGES_TOKENS, CommandExecutor
from pearl.service.loop.event_ingest import EventIngest
from pearl.service.loop.inbox import Inbox, Item
from pearl.service.replay import encode_commands, encode_event
from pearl.service.run_files import RunFiles
from pearl.types.commands import AnyCommand, Finish
from pearl.types.events import AnyEvent, Tick

BATCH_ITEMS = 32
"""Handled, written and performed together: enough to share the writes, a few milliseconds at most."""


class RunClock:
    """Seconds since the run's start, continued over a resume: ``base_s`` is where the former life stopped."""

    def __init__(self, clock: Clock, base_s: float = 0.0) -> None:
        self._clock = clock
        self._start = clock.now() - base_s

    def now(self) -> float:
        return self._clock.now() - self._start


class EventLoop:
    def __init__(
        self,
        core: Coordinator,
        clock: RunClock,
        inbox: Inbox,
        ingest: EventIngest,
        executor: CommandExecutor,
        store: TokenStore,
        journal: Journal,
        files: RunFiles,
    ) -> None:
        self._core = core
        self._clock = clock
        self._inbox = inbox
        self._ingest = ingest
        self._executor = executor
        self._store = store
        self._journal = journal
        self._files = files
        self._entries: list[tuple[float, bytes, bytes]] = []
        self._commands: list[AnyCommand] = []

    async def run(self) -> Finish:
        """Run until the core's Finish. After an OSError (disk full, say) the run must end."""
        while self._executor.finished is None:
            self.handle(await self._inbox.take(self._until_wakeup(), BATCH_ITEMS))
            # The sockets' turn: what is urgent comes in, and is done, between two batches.
            await asyncio.sleep(0)
        return self._executor.finished

    def _until_wakeup(self) -> float | None:
        due = self._core.next_wakeup()
        return None if due is None else max(0.0, due - self._clock.now())

    def handle(self, items: list[Item]) -> None:
        """Take the items in order; their commands are performed on return."""
        for item in items:
            event = self._ingest.to_event(item)
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
            self._executor.perform(command)
        self._files.flush()
        if self._journal.wants_snapshot and self._executor.finished is None:
            self._files.save_offsets(self._journal.num_entries, self._clock.now())
            self._journal.roll(self._core.snapshot())
