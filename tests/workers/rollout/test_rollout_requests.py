"""A worker's requests over an engine that raises: each ends once, and its neighbours go on."""

from typing import Any, cast

import numpy as np

from pearl.runtime.rpc_client import RpcClient
from pearl.types.config import RolloutConfig
from pearl.types.messages.rollout import Deltas, Generate, SamplingParams
from pearl.workers.rollout.live_requests import Requests
from pearl.workers.rollout.protocol import Delta, Emit, Engine, GenerateRequest


class FragileEngine:
    """Answers at once; attempt 2 makes it raise, attempt 3 after it was answered."""

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        if request.attempt == 2:
            raise KeyError("\ud800")
        emit(Delta(request.attempt, [], [], [], 0, "length"))
        if request.attempt == 3:
            raise OSError("too late")

    def iteration_stats(self) -> list[Any]:
        return []


class KeptFrames:
    def __init__(self) -> None:
        self.frames: list[Deltas] = []

    async def notify(self, message: Deltas) -> None:
        self.frames.append(message)


async def test_whatever_the_engine_raises_is_that_requests_only_end() -> None:
    requests = Requests(RolloutConfig(), "rollout.0.1", cast(Engine, FragileEngine()))
    kept = KeptFrames()
    requests.connect(cast(RpcClient, kept))
    for attempt in (1, 2, 3):
        ids = np.arange(3, dtype="<i4").tobytes()
        await requests.generate(Generate(attempt, attempt, ids, SamplingParams(4, 1.0, ()), 0))
    await requests.send_frame()
    (frame,) = kept.frames
    assert [(delta.attempt, delta.finish) for delta in frame.deltas] == [
        (1, "length"),
        (2, "error"),
        (3, "length"),
    ]
    assert frame.deltas[1].error == r"KeyError: '\ud800'"
    assert requests.num_live == 0
