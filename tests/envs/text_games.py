"""A small text environment: guess a number with a tool; wrong use of it is answered, not punished."""

import json
from collections.abc import Sequence

from pearl.envs.protocol import Split
from pearl.envs.text import Message, TextEnvironment, TextEpisode, Tool

GUESS: Tool = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}


class GuessEpisode(TextEpisode):
    def __init__(self, game: "Guess", number: int) -> None:
        self._game = game
        self._number = number

    async def reset(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return [{"role": "user", "content": f"Guess a number up to {self._game.size}."}], [GUESS]

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        self._game.seen.append(message)
        calls = message.get("tool_calls")
        if not calls:
            return [{"role": "user", "content": "Use the tool."}], 0.0, False
        guess = json.loads(calls[0]["function"]["arguments"])["number"]
        if guess == self._number:
            return [], 1.0, True
        hint = "higher" if guess < self._number else "lower"
        return [{"role": "tool", "content": hint, "tool_call_id": calls[0]["id"]}], 0.1, False


class Guess(TextEnvironment):
    num_evaluation_tasks = 4
    can_restore = True

    def __init__(self, *, size: int = 10) -> None:
        self.size = size
        self.seen: list[Message] = []

    def episode(self, split: Split, task: int) -> TextEpisode:
        return GuessEpisode(self, task % self.size)
