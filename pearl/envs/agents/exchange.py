"""Where an agent that owns its loop meets an environment that is asked for one turn at a time.

The agent's side calls ``ask``: its messages become the ids of the next prompt or observation, and it waits for what
is generated. The environment's side waits with ``next`` for the agent's next request or end, and ``answer`` gives it
the generated ids. One request is open at a time, further ones wait in order; what happens to workers and weights
meanwhile is not seen here at all. Every wait ends with ``close``.
"""

import asyncio
import time
from typing import Literal

import msgspec

from pearl.envs.agents.completion import (
    AnswerMessage,
    ChatRequest,
    Choice,
    Completion,
    FinishReason,
    FunctionCall,
    ToolCall,
    Usage,
)
from pearl.envs.agents.errors import (
    EditedHistoryError,
    OutOfContextError,
    OutOfTurnsError,
    RequestError,
    TrajectoryEndedError,
)
from pearl.envs.protocol import EpisodeLimits, InfrastructureError
from pearl.envs.text.chat import Chat
from pearl.envs.text.conversation import Conversation
from pearl.envs.text.messages import Message, is_same
from pearl.envs.text.options import ProvenChat


class AgentCounters(msgspec.Struct):
    """Over the life of an environment worker."""

    answers: int = 0
    unread_calls: int = 0  # answers with a tool call that could not be read
    cut_answers: int = 0  # shortened for the agent by its own stop or max_tokens
    edited_histories: int = 0  # requests refused since they do not go on from the recorded messages
    joined_retries: int = 0  # marked retries that got the answer of the request they repeat
    late_calls: int = 0  # after their trajectory's end
    truncated: int = 0  # requests beyond the context or the turns


class Prompt(msgspec.Struct, frozen=True):
    """The agent asks: these ids are to be appended."""

    ids: list[int]


class Truncation(msgspec.Struct, frozen=True):
    """The agent asked for more than the job's limits allow; these ids fill the context, or there are none."""

    ids: list[int]


class _Open(msgspec.Struct, eq=False):
    request: ChatRequest
    answered: asyncio.Event
    completion: Completion | None = None


class Exchange:
    def __init__(self, proven: ProvenChat, limits: EpisodeLimits, counters: AgentCounters) -> None:
        self._chat: Chat = proven.chat
        self._limits = limits
        self._conversation = Conversation(proven, limits)
        self._counters = counters
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._next: Prompt | Truncation | None = None
        self._open: _Open | None = None
        self._closed = False
        self.truncated: RequestError | None = None
        self.halted = asyncio.Event()  # the latest request was refused over the limits or an edited history
        self.edited = ""  # why it was refused as an edited history
        self.broken = ""  # why PEARL could not answer a request that is in order

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def num_answers(self) -> int:
        return self._conversation.num_answers

    def messages(self) -> list[Message]:
        return list(self._conversation.messages)

    # the agent's side

    async def ask(self, request: ChatRequest) -> Completion:
        """Wait for the answer to the request, and for those of earlier requests before.

        Raises:
            RequestError: it cannot be answered.
        """
        async with self._turn:
            if self._open is not None:  # whoever asked has gone; what was asked is answered all the same
                await self._open.answered.wait()
            self._check_open()
            try:
                ids = self._append(request)
            except EditedHistoryError as error:
                self._counters.edited_histories += 1
                self.edited = str(error)
                self.halted.set()
                raise
            except InfrastructureError as error:
                self.broken = str(error)
                raise
            self.edited = ""
            self.halted.clear()
            self._open = opened = _Open(request, asyncio.Event())
            self._offer(Prompt(ids))
            await opened.answered.wait()
            if opened.completion is None:
                raise TrajectoryEndedError("the trajectory ended while this call waited")
            return opened.completion

    def _check_open(self) -> None:
        if self._closed:
            raise TrajectoryEndedError("the trajectory has ended")
        if self.truncated is not None:
            raise self.truncated
        conversation = self._conversation
        if conversation.num_answers >= self._limits.max_turns:
            self._truncate(
                OutOfTurnsError(f"environment.max_turns = {self._limits.max_turns} answers have been given"),
                [],
            )

    def _append(self, request: ChatRequest) -> list[int]:
        conversation = self._conversation
        if not conversation.num_answers and not conversation.messages:
            ids = conversation.begin(request.messages, request.tools)
            if conversation.room <= 0:
                self._truncate(self._out_of_context(len(ids)), ids)
            return ids
        self._check_continues(request)
        num_tokens = conversation.num_tokens
        ids, fits = conversation.extend(request.messages[len(conversation.messages) :])
        if not fits:
            self._truncate(self._out_of_context(num_tokens + len(ids)), ids)
        return ids

    def _check_continues(self, request: ChatRequest) -> None:
        """Refuse a request that does not continue the history: it is never trained as something else."""
        recorded, given = self._conversation.messages, request.messages
        for index, (old, new) in enumerate(zip(recorded, given, strict=False)):
            if not is_same(old, new):
                raise EditedHistoryError(
                    f"messages[{index}] is not what it was in the call before{_NOT_BUILT}"
                )
        if len(given) <= len(recorded):
            raise EditedHistoryError(f"{len(given)} messages go back to before the latest answer{_NOT_BUILT}")
        added = given[len(recorded) :]
        spoken = next((index for index, message in enumerate(added) if message["role"] == "assistant"), None)
        if spoken is not None:
            where = len(recorded) + spoken
            raise EditedHistoryError(f"messages[{where}] is an answer that was not given here{_NOT_BUILT}")
        if request.tools != self._conversation.tools:
            raise EditedHistoryError(f"tools are not those of the first call{_NOT_BUILT}")

    def _out_of_context(self, num_tokens: int) -> OutOfContextError:
        return OutOfContextError(
            f"the messages are {num_tokens} tokens or more; this model's maximum context length is "
            f"{self._limits.max_context_tokens} tokens (rollout.max_context_tokens)"
        )

    def _truncate(self, error: RequestError, ids: list[int]) -> None:
        self.truncated = error
        self.halted.set()
        self._counters.truncated += 1
        self._offer(Truncation(ids))
        raise error

    def _offer(self, offered: Prompt | Truncation) -> None:
        self._next = offered
        self._changed.set()

    # the environment's side

    async def next(self) -> Prompt | Truncation | None:
        """The agent's next request; None once ``finish`` says that there will be none."""
        await self._changed.wait()
        offered, self._next = self._next, None
        self._changed.clear()
        return offered

    def answer(self, action: list[int], truncated: bool) -> None:
        """Give the open request what was generated."""
        opened, self._open = self._open, None
        assert opened is not None
        text, cut = self._visible(action, opened.request)
        prompt_tokens = self._conversation.num_tokens
        answer = self._conversation.answer(action, visible=text)
        self._counters.answers += 1
        self._counters.unread_calls += bool(answer.failure)
        self._counters.cut_answers += bool(cut)
        calls = answer.message.get("tool_calls")
        finish: FinishReason = "tool_calls" if calls else cut or ("length" if truncated else "stop")
        message = AnswerMessage(
            content=answer.message["content"] or (None if calls else ""),
            tool_calls=[
                ToolCall(id=call["id"], function=FunctionCall(**call["function"])) for call in calls or ()
            ]
            or None,
            reasoning_content=answer.message.get("reasoning_content"),
        )
        opened.completion = Completion(
            id=f"chatcmpl-{self._conversation.num_answers}",
            choices=[Choice(message=message, finish_reason=finish)],
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=len(action),
                total_tokens=prompt_tokens + len(action),
            ),
            created=int(time.time()),  # noqa: TID251  # a date shown to people
        )
        opened.answered.set()

    def _visible(self, action: list[int], request: ChatRequest) -> tuple[str, Literal["", "stop", "length"]]:
        """Return what the agent gets of the answer, and why that is not all. The context keeps all that was
        generated."""
        text = self._chat.text_of(action)
        cut: Literal["", "stop", "length"] = ""
        if request.max_tokens is not None and len(action) > request.max_tokens:
            kept = self._chat.text_of(action[: request.max_tokens])
            if len(kept) < len(text):
                text, cut = kept, "length"
        at = min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            text, cut = text[:at], "stop"
        return text, cut

    def finish(self) -> None:
        """The agent has ended: whoever waits for its next request is to stop waiting."""
        self._changed.set()

    def close(self) -> None:
        """Answer nothing more; calls that wait get a TrajectoryEndedError. Repeated calls do nothing."""
        self._closed = True
        if self._open is not None:
            self._open.answered.set()
            self._open = None
        self._changed.set()


_NOT_BUILT = (
    ": branches of a trajectory (edited histories, compaction, subagents) are not built yet; "
    "append to the messages"
)
