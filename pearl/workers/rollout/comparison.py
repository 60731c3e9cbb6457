"""Compares an engine that has just taken its first weights with plain ``transformers``: log-probs and draws.

Responses to a short and a long prompt are sampled and a short one is generated greedily, in one batch, so that prefill
in chunks, decoding, positions, temperature and sampler all take part.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pearl.runtime.counter_rng import counter_bits
from pearl.types.comparison import Comparison
from pearl.types.config import Config
from pearl.types.messages.rollout import SamplingParams
from pearl.types.splitmix import splitmix64
from pearl.workers import reference
from pearl.workers.reference import Gaps, Ids, Reference
from pearl.workers.rollout.protocol import Delta, Engine, GenerateRequest
from pearl.workers.rollout.snapshot_protocol import Received

NEW_TOKENS = 16
SEED = 0x5EED
FIRST_ATTEMPT = 1 << 62
"""Far from those of the run."""
DRAW_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Of the uniform number beside the interval that belongs to the token it drew."""


@dataclass
class _Answer:
    what: str
    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str = ""


class EngineComparison:
    """For one update: ``keep`` while its bytes are there, then ``run`` on the engine that has loaded it."""

    def __init__(self, config: Config, vocabulary_size: int, engine: Engine) -> None:
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._engine = engine
        self._reference: Reference | None = None
        self._skipped = ""
        self._error = ""
        self._seconds = 0.0
        self._attempts = itertools.count(FIRST_ATTEMPT)

    def keep(self, received: Received) -> None:
        """Build the ``transformers`` reference from the received weights, or note why it is skipped; blocking."""
        snapshot = received.snapshot
        num_elements = sum(int(np.prod(spec.shape)) for spec in snapshot.tensors)
        self._reference, self._error = None, ""
        self._skipped = reference.why_skipped(self._config.agreement, num_elements)
        if not self._skipped and self._engine.role != "colocated":
            self._skipped = f"a {self._engine.role} worker cannot serve a request alone"
        if self._skipped:
            return
        began = time.monotonic()
        try:
            limit = self._config.rollout.max_context_tokens
            plain = Reference(self._config.model, self._vocabulary_size, limit)
            plain.load(snapshot.tensors, list(received))
        # transformers raises what it likes; the run ends with the text.
        except Exception as error:  # noqa: BLE001
            self._error = (
                f"transformers' own model cannot be had to compare with: {type(error).__name__}: {error}"
            )
        else:
            self._reference = plain
        self._seconds = time.monotonic() - began

    async def run(self) -> Comparison:
        """Generate on the engine and compare log-probs and sampled tokens with the reference; skipped or failed is
        in the result."""
        plain, self._reference = self._reference, None
        if plain is None:
            return Comparison(skipped=self._skipped, error=self._error)
        began = time.monotonic()
        answers = await self._generate()
        self._engine.iteration_stats()  # of these iterations nobody shall learn
        tokens = sum(len(answer.ids) for answer in answers)
        found, error = await asyncio.to_thread(self._judge, plain, answers)
        mean, largest = reference.statistics(found) if found else (0.0, 0.0)
        seconds = self._seconds + time.monotonic() - began
        counted = sum(len(gaps.positions) for gaps in found)
        if not np.isfinite(mean):
            mean = largest = 0.0  # the error says it
        return Comparison(counted, mean, largest, tokens, seconds, "", error)

    async def _generate(self) -> list[_Answer]:
        answers = self._requests()
        waiting = {answer.request.attempt: answer for answer in answers}
        done = asyncio.Event()

        def emit(delta: Delta) -> None:
            answer = waiting[delta.attempt]
            answer.ids += delta.ids
            answer.logprobs += delta.logprobs
            if delta.finish is not None:
                answer.error = "" if delta.finish == "length" else f"{delta.finish}: {delta.error}"
                del waiting[delta.attempt]
            if not waiting:
                done.set()

        for answer in answers:
            await self._engine.generate(answer.request, emit)
        await done.wait()  # limited by the update of which it is a part
        return answers

    def _requests(self) -> list[_Answer]:
        rollout = self._config.rollout
        most = reference.long_tokens(self._config.agreement, rollout.max_context_tokens)
        new = min(NEW_TOKENS, most - 1)
        short, long = min(reference.SHORT_TOKENS, most - new), most - new
        kinds = [
            ("short", short, rollout.temperature),
            ("long", long, rollout.temperature),
            ("short", short, 0.0),
        ]
        answers = []
        for name, length, temperature in kinds:
            how = "sampled" if temperature else "greedy"
            params = SamplingParams(new, temperature, ())
            ids = reference.prompt(self._vocabulary_size, length)
            request = GenerateRequest(next(self._attempts), ids, params, SEED)
            answers.append(_Answer(f"a {how} answer to a {name} prompt of {length} tokens", request))
        return answers

    def _judge(self, plain: Reference, answers: Sequence[_Answer]) -> tuple[list[Gaps], str]:
        model, engine = self._config.model, f"the {self._engine.name} engine"
        found, drawn = [], ""
        for answer in answers:
            if answer.error or not answer.ids:
                return (
                    [],
                    f"{engine} did not answer a request of its own comparison: {answer.error or 'no token'}",
                )
            prompt: Ids = answer.request.ids
            whole = np.concatenate([prompt, np.array(answer.ids, np.int32)])
            positions = list(range(len(prompt), len(whole)))
            rows = plain.logprobs(whole, positions, answer.request.params.temperature)
            chosen = rows.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
            found.append(Gaps(answer.what, positions, answer.logprobs, chosen.tolist()))
            place = wrong_draw(rows, answer, DRAW_TOLERANCES[model.dtype])
            if place is not None and not drawn:
                drawn = (
                    f"{engine} does not draw from the distribution of {model.path!r}: token {answer.ids[place]} at "
                    f"position {positions[place]} of {answer.what} is not the one that its seed names"
                )
        return found, reference.complaint(engine, model, found) or drawn


def wrong_draw(rows: torch.Tensor, answer: _Answer, tolerance: float) -> int | None:
    """Return the index in the response of the first token that distribution, seed and position (greedy: argmax) do
    not reproduce, or None."""
    ids = torch.tensor(answer.ids)[:, None]
    if answer.request.params.temperature == 0.0:
        behind = rows.max(-1).values - rows.gather(1, ids)[:, 0]
        wrong = behind > tolerance
    else:
        cumulative = rows.exp().cumsum(-1)
        upper = cumulative.gather(1, ids)[:, 0]
        lower = upper - rows.gather(1, ids)[:, 0].exp()
        uniform = _uniforms(answer.request.seed, len(answer.request.ids), len(answer.ids))
        wrong = (uniform < lower - tolerance) | (uniform > upper + tolerance)
    places = wrong.nonzero()[:, 0].tolist()
    return int(places[0]) if places else None


def _uniforms(seed: int, first: int, count: int) -> torch.Tensor:
    """Return the uniforms of the tokens at the positions from ``first`` on."""
    keys = np.full(count, splitmix64(seed), np.uint64)
    bits = counter_bits(keys, np.arange(first, first + count))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
