"""The client that a rollout function gets: the calls of the ``openai`` package's asynchronous one, in-process.

``await client.chat.completions.create(messages=..., tools=..., stop=..., max_tokens=...)`` is answered by the model in
training; everything it answers is recorded in the trajectory that the client belongs to.
"""

from collections.abc import Sequence
from typing import Any

from pearl.envs.agents.completion import Completion, read_request
from pearl.envs.agents.errors import UnsupportedError
from pearl.envs.agents.exchange import Exchange


class Completions:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, *, messages: Sequence[Any], **options: Any) -> Completion:
        """Answer ``messages``: those of the call before, then its answer, then what is new.

        Raises:
            OutOfContextError: they do not fit the context any more.
            OutOfTurnsError: the last turn has been had.
            UnsupportedError, MessageError: the call asks for what is not offered, or is not in OpenAI's form.
            EditedHistoryError: they do not go on from the call before.
        """
        if options.get("stream"):
            raise UnsupportedError("stream: an answer comes whole in the same process; remove it")
        return await self._exchange.ask(read_request({"messages": list(messages), **options}))


class ChatNamespace:
    def __init__(self, exchange: Exchange) -> None:
        self.completions = Completions(exchange)


class Client:
    def __init__(self, exchange: Exchange) -> None:
        self.chat = ChatNamespace(exchange)
