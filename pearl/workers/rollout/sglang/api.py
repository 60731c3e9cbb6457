"""SGLang's endpoints by name, with a limit on each call and what it says checked."""

import asyncio
from typing import Any, Literal

from pearl.workers.rollout.protocol import MemoryTag, Role
from pearl.workers.rollout.sglang.client import Client, OnEnd, OnEvent, ServerError, Stream, complaint
from pearl.workers.rollout.sglang.settings import LOADER

QUICK_S = 10.0
"""For what a scheduler does between two iterations."""
BUSY = 400
"""How SGLang says that requests are pending."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Between two tries of what it refuses while it is busy."""
SWITCH_LIMIT_S = 60.0
LOAD_LIMIT_S = 120.0
FENCE_CALLS = 3
"""Answers of the scheduler after which all that it streamed before has come: its outputs and its answers take two
queues into the server and two connections out of it."""


class SglangApi:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def generate(self, body: dict[str, Any], on_event: OnEvent, on_end: OnEnd) -> Stream:
        return await self._client.stream("/generate", body, on_event, on_end)

    async def abort(self, rid: str) -> None:
        """One that it does not know yet, or any more, is not told apart."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self, mode: Literal["in_place"]) -> None:
        await self._post("/pause_generation", {"mode": mode})
        for _ in range(FENCE_CALLS):
            await self.loads()

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})

    async def flush(self, limit_s: float) -> None:
        """Forget all cached KV, once it is idle; until then SGLang refuses, and is asked again after a pause.

        Raises:
            ServerError: it was not idle within the limit, or did not answer.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = max(0.0, end_s - loop.time())
            path = f"/flush_cache?timeout={left_s:.3g}"  # not every version waits for it
            answer = await self._client.call("POST", path, {}, limit_s=left_s + QUICK_S)
            if answer.is_good:
                return
            if answer.status != BUSY or loop.time() + pause_s > end_s:
                raise ServerError(
                    f"POST /flush_cache: HTTP {answer.status} after {limit_s - max(0.0, end_s - loop.time()):.1f} s: "
                    f"{complaint(answer.value)}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def load_weights(self, payloads: list[str], label: str) -> None:
        """All of them, into whatever it does or waits with; cached KV is left to ``flush``."""
        await self._post("/begin_weight_update", {}, LOAD_LIMIT_S)
        try:
            body = {
                "serialized_named_tensors": payloads,
                "load_format": LOADER,
                "flush_cache": False,  # refused for a moment after the last request, and the update with it
                "weight_version": label,
            }
            await self._post("/update_weights_from_tensor", body, LOAD_LIMIT_S)
        finally:
            await self._post("/end_weight_update", {}, LOAD_LIMIT_S)

    async def digest(self) -> str:
        """SGLang's own, over the weights that all its ranks serve."""
        said = await self._post("/weights_checker", {"action": "checksum"}, LOAD_LIMIT_S)
        ranks = said.get("ranks") or said.get("payload") or []
        if not ranks:
            raise ServerError(f"POST /weights_checker: no checksums in {str(said)[:200]}")
        return "+".join(str(rank["per_gpu_checksum"]) for rank in ranks)

    async def release(self, tags: list[MemoryTag]) -> None:
        await self._post("/release_memory_occupation", {"tags": tags}, LOAD_LIMIT_S)

    async def restore(self, tags: list[MemoryTag]) -> None:
        await self._post("/resume_memory_occupation", {"tags": tags}, LOAD_LIMIT_S)

    async def switch_role(self, role: Role) -> None:
        body = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
        await self._post("/pd_role_switch", body, SWITCH_LIMIT_S)

    async def loads(self) -> dict[str, Any]:
        """Return the scheduler's load."""
        said = await self._client.good("GET", "/v1/loads", limit_s=QUICK_S)
        found: dict[str, Any] = said["loads"][0]
        return found

    async def _post(self, path: str, body: Any, limit_s: float = QUICK_S) -> Any:
        said = await self._client.good("POST", path, body, limit_s=limit_s)
        if isinstance(said, dict) and said.get("success") is False:
            raise ServerError(f"POST {path}: {said.get('message')}")
        return said
