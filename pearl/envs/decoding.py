"""Token ids as text for people, by the environment's own ``decode(ids) -> str`` where it has one.

``python -m pearl.envs.decoding`` reads a question as JSON from its standard input and answers it: how a command reads a
run's trajectories without running the environment's code in its own process.
"""

import os
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from pearl.envs.loader import load_environment
from pearl.envs.protocol import Environment
from pearl.types.error_text import without_surrogates

MAX_CHARACTERS = 8192
"""Of one part in a sample."""


class DecodeQuestion(msgspec.Struct, frozen=True):
    name: str
    options: dict[str, int | float | str | bool]
    model_path: str
    parts: list[list[int]]


class DecodeAnswer(msgspec.Struct, frozen=True):
    texts: list[str] | None = None
    error: str = ""


def decode_parts(
    environment: Environment, parts: Sequence[Sequence[int]], limit: int = MAX_CHARACTERS
) -> tuple[str, ...] | None:
    """Decode each part, at most ``limit`` characters of it; None when the environment has no ``decode``."""
    decode = getattr(environment, "decode", None)
    if decode is None:
        return None
    return tuple(shortened(str(without_surrogates(decode(list(ids)))), limit) for ids in parts)


def shortened(text: str, limit: int) -> str:
    """Keep beginning and end, with a note of what is missing between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are left out here ...]\n{text[-half:]}"


def unpacked(ids: bytes) -> list[int]:
    found: list[int] = np.frombuffer(ids, "<i4").tolist()
    return found


def main() -> int:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the person's code prints must not be taken for the answer
    try:
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=DecodeQuestion)
        environment = load_environment(question.name, question.options, question.model_path)
        texts = decode_parts(environment, question.parts, 1 << 20)
        found = DecodeAnswer(None if texts is None else list(texts))
    except Exception as error:  # noqa: BLE001 - a person's code may raise anything
        found = DecodeAnswer(error=f"{type(error).__name__}: {error}"[:500])
    with answer:
        answer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
