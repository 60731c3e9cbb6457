"""Attempts whose prefill and decode run on two SGLang servers, as one worker sees its stage.

A stage is handed to SGLang when both are there and of one version; from then on each hears of the other's failure and
is taken out of SGLang, which would otherwise wait for the other, or hold its KV.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Literal

from pearl.workers.rollout.sglang.attempt import Attempt
from pearl.workers.rollout.sglang.pair_rendezvous import Offer, PairRendezvous, PairStage
from pearl.workers.rollout.sglang.request_manager import RequestManager


class PairedRequests:
    def __init__(
        self,
        group: asyncio.TaskGroup,
        running: RequestManager,
        point: PairRendezvous,
        bootstrap_port: Callable[[], int],
    ) -> None:
        self._group = group
        self._running = running
        self._point = point
        self._bootstrap_port = bootstrap_port
        running.on_landed = lambda attempt: point.over(attempt.number)
        running.on_end = self._ended

    def begin(self, attempt: Attempt, kind: Literal["prefill", "decode"]) -> None:
        attempt.stage = kind
        if not self._running.is_open:
            self._running.end(
                attempt, "abort", "this worker is paused; its other stage may be elsewhere by then"
            )
        elif kind == "decode":
            self._point.expect(
                PairStage(
                    attempt.number,
                    kind,
                    lambda offer: self._judge(attempt, offer),
                    lambda reason: self._failed(attempt, reason),
                )
            )
        else:
            stage = PairStage(
                attempt.number,
                kind,
                lambda offer: self._go(attempt, offer),
                lambda reason: self._failed(attempt, reason),
            )
            name = f"offer {attempt.number}"
            self._group.create_task(
                self._point.offer(stage, attempt.request.pair, self._offer(attempt)), name=name
            )

    def _offer(self, attempt: Attempt) -> Offer:
        version = self._running.version
        assert version is not None
        room = secrets.randbits(62)
        return Offer(
            "", attempt.number, self._point.name, version, self._point.host, self._bootstrap_port(), room
        )

    def _judge(self, attempt: Attempt, offer: Offer) -> str:
        """Start a decode stage, or return why it cannot start."""
        if offer.name != attempt.request.pair:
            return f"{offer.name} offered KV, {attempt.request.pair} was to"
        if offer.version != self._running.version:
            return f"KV of version {offer.version} was offered to version {self._running.version}"
        return self._go(attempt, offer)

    def _go(self, attempt: Attempt, offer: Offer) -> str:
        if not self._running.is_open:
            return "this worker is paused"
        if attempt.number not in self._running.live:
            return "it is over here"
        place: dict[str, Any] = {
            "bootstrap_host": offer.host,
            "bootstrap_port": offer.port,
            "bootstrap_room": offer.room,
        }
        self._running.submit(attempt, place)
        return ""

    def _failed(self, attempt: Attempt, reason: str) -> None:
        if attempt.number not in self._running.live:
            return
        if not attempt.rid:
            self._running.end(attempt, "abort", reason)
        else:
            self._group.create_task(self._running.abort(attempt.number), name=f"abort {attempt.number}")

    def _ended(self, attempt: Attempt, reason: str) -> None:
        if attempt.stage is not None:
            self._point.give_up(attempt.number, reason)

    async def end_transfers(self) -> None:
        """End the requests whose KV, of the version until now, may be in transfer."""
        async with asyncio.TaskGroup() as group:
            for attempt in list(self._running.live.values()):
                if attempt.stage == "prefill" or (attempt.stage == "decode" and attempt.num_known == 0):
                    group.create_task(self._running.abort(attempt.number), name=f"abort {attempt.number}")
