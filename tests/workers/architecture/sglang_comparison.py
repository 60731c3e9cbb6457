"""Compares architectures in SGLang, on this host's CPU, with transformers.

``python tests/workers/architecture/sglang_comparison.py NAME...`` tries the names (without any: all that the survey
accepts) and records each outcome beside this file.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "rollout"), str(HERE.parents[2])]

import engine_contract  # noqa: E402
import sglang_support  # noqa: E402
import torch  # noqa: E402
from engine_support import greedy_reference, ids, reference_logprobs, request  # noqa: E402
from test_sglang_experts import image_of  # noqa: E402
from tiny_models import CONFIGS, PADDING, VOCABULARY, make_model  # noqa: E402

from pearl.types.config import ModelConfig  # noqa: E402
from pearl.workers.architecture.survey import survey  # noqa: E402
from pearl.workers.rollout.sglang.server import Server  # noqa: E402
from pearl.workers.rollout.sglang.settings import SglangSettings  # noqa: E402
from pearl.workers.weight_transfer.checksum import model_checksum  # noqa: E402

RECORD = HERE / "sglang_outcomes.json"
ROWS = VOCABULARY + PADDING
MAX_CONTEXT_TOKENS = 96
MAX_GAP_NATS = 1e-4
SHOWN_CHARACTERS = 160


class DiffersError(Exception):
    """The engine was proven to hold the weights, and computes something else."""


def compare(name: str, directory: Path) -> None:
    """Serve a tiny random model of the architecture and compare two versions of its weights.

    Raises:
        DiffersError: greedy ids or log-probs are not those of transformers' eager forward.
        Exception: SGLang cannot start or load it, or our proof refuses what it loaded.
    """
    model: Any = make_model(CONFIGS[name](), directory).train(False)
    model.set_attn_implementation("eager")
    config = ModelConfig(path=str(directory))
    with sglang_support.running_servers(
        "colocated", model=config, vocabulary_size=ROWS, max_context_tokens=MAX_CONTEXT_TOKENS
    ) as (found,):
        asyncio.run(_compare(found, config, model))


async def _compare(found: tuple[Server, SglangSettings], config: ModelConfig, model: Any) -> None:
    def version(seed: int) -> Any:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return image_of(model, seed)

    async with sglang_support.engine_on(*found, model=config, vocabulary_size=ROWS) as engine:
        subject = engine_contract.Subject(engine, version)
        for seed in (1, 2):
            await subject.take(seed)
            assert await engine.checksum() == model_checksum(model)
            prompts = {10 * seed + n: ids(10 * seed + n, length) for n, length in enumerate((3, 40))}
            await subject.generate(
                *[request(a, prompt, 12, temperature=0.0) for a, prompt in prompts.items()]
            )
            results = await subject.finished(*prompts)
            for attempt, prompt in prompts.items():
                got = results[attempt]
                if not got.ids:
                    raise ValueError(f"its request failed: {got.error}")
                expected = reference_logprobs(model, prompt, got.ids)
                gap = max(abs(a - b) for a, b in zip(got.logprobs, expected, strict=True))
                if got.ids != greedy_reference(model, prompt, 12) or not gap <= MAX_GAP_NATS:
                    raise DiffersError(f"by up to {gap:.2g} nats after update {seed}")


def outcome(name: str) -> str:
    """Return "right", "differs: ..." or "cannot run: ..." with the first line of the error."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            compare(name, Path(directory))
        except Exception as error:  # noqa: BLE001 - whatever an architecture does to a server is its outcome
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, DiffersError):
                return f"differs: {error}"
            first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            return f"cannot run: {first.replace('|', '/')[:SHOWN_CHARACTERS]}"
    return "right"


def main(names: list[str]) -> None:
    accepted = [name for name, make in CONFIGS.items() if not survey(make(), MAX_CONTEXT_TOKENS).problems]
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    python = sglang_support.python() or sys.executable
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    for name in names or accepted:
        found = outcome(name)
        record = json.loads(RECORD.read_text("utf-8"))
        outcomes = record["outcomes"] if record["sglang"] == version else {}
        record = {"sglang": version, "outcomes": dict(sorted({**outcomes, name: found}.items()))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        sys.stdout.write(f"{name}: {found}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
