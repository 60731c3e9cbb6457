"""One trajectory's conversation: messages beside the number of ids they have become. Append-only."""

from collections.abc import Sequence

from pearl.envs.protocol import EpisodeLimits, InfrastructureError
from pearl.envs.text.chat import Answer
from pearl.envs.text.messages import Message, Tool
from pearl.envs.text.options import ProvenChat
from pearl.envs.text.proof import Kind

MAX_CUTS = 8
"""Of new messages until they fit: an id stands for few or many characters, so the first cut may miss."""
NOTE_CHARACTERS = 48
"""What stands where something was cut."""


class Conversation:
    def __init__(self, proven: ProvenChat, limits: EpisodeLimits) -> None:
        self._chat = proven.chat
        self._refused = proven.refused
        self._limits = limits
        self._has_thinking = False
        self._ended = False  # the latest answer has its end token
        self.messages: list[Message] = []
        self.tools: list[Tool] = []
        self.num_tokens = 0
        self.num_answers = 0

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The first prompt's ids."""
        ids = self._chat.prompt(messages, tools)
        self.messages, self.tools = list(messages), list(tools)
        self.num_tokens = len(ids)
        return ids

    def answer(self, action: Sequence[int], *, visible: str | None = None) -> Answer:
        """Take in what was generated. ``visible`` is the part of its text that was passed on; None = all."""
        text = self._chat.text_of(action) if visible is None else visible
        answer = self._chat.read(text, self.num_answers)
        self.messages.append(answer.message)
        self.num_tokens += len(action)
        self.num_answers += 1
        self._ended = bool(action) and action[-1] in self._chat.stop_ids
        self._has_thinking = self._has_thinking or answer.has_thinking
        return answer

    @property
    def room(self) -> int:
        """Ids that the context has left."""
        return self._limits.max_context_tokens - self.num_tokens

    def extend(self, new: Sequence[Message]) -> tuple[list[int], bool]:
        """The ids of what follows an answer, and whether they fit with room for at least one more token.

        Contents that make them too long for one observation are cut in their middle, with a note of what is missing.

        Raises:
            InfrastructureError: the template cannot append these messages.
        """
        self._check_proven(new)
        ids = self._glue(new)
        kept = list(new)
        for _ in range(MAX_CUTS):
            excess = len(ids) - self._limits.max_observation_tokens
            if excess <= 0:
                break
            kept = _cut_longest(kept, excess / len(ids))
            ids = self._glue(kept)
        else:
            if len(ids) > self._limits.max_observation_tokens:
                raise InfrastructureError(
                    f"{len(new)} messages after an answer are {len(ids)} ids, more than "
                    f"environment.max_observation_tokens = {self._limits.max_observation_tokens}"
                )
        self.messages += new
        fits = len(ids) < self.room
        ids = ids[: max(self.room, 0)]  # what does not fit ends the trajectory: the model sees no more of it
        self.num_tokens += len(ids)
        return ids, fits

    def _glue(self, new: Sequence[Message]) -> list[int]:
        return self._chat.follow_up(self.messages, new, self.tools, ended=self._ended)

    def failure_message(self, failure: str) -> Message:
        """Return what the model is shown when a tool call of its answer could not be read."""
        content = f"Error: {failure}."
        if "tool after a bad call" in self._refused or self._chat.tool_format == "none":
            return {"role": "user", "content": content}
        return {"role": "tool", "content": content, "tool_call_id": f"c{self.num_answers - 1:05d}000"}

    def _check_proven(self, new: Sequence[Message]) -> None:
        base: Kind = "user" if any(message["role"] != "tool" for message in new) else "tool"
        after: Kind = "user after thinking" if base == "user" else "tool after thinking"
        for kind in (base, *((after,) if self._has_thinking else ())):
            if kind in self._refused:
                raise InfrastructureError(
                    f"the chat template does not append here ({kind}: {self._refused[kind]}); docs/agents.md says "
                    "which options help"
                )


def _cut_longest(messages: Sequence[Message], ratio: float) -> list[Message]:
    """Shorten the longest content, so that all contents together lose somewhat more than ``ratio``."""
    longest = max(range(len(messages)), key=lambda index: len(messages[index]["content"]))
    content = messages[longest]["content"]
    total = sum(len(message["content"]) for message in messages)
    num_kept = max(0, int(total * (1 - ratio) * 0.9) - NOTE_CHARACTERS - (total - len(content)))
    num_cut = len(content) - num_kept
    head = (len(content) - num_cut) // 2
    tail = len(content) - num_cut - head
    note = f"\n[... {num_cut} characters are cut here ...]\n"
    cut = content[:head] + note + content[len(content) - tail :]
    return [
        message | {"content": cut} if index == longest else message for index, message in enumerate(messages)
    ]
