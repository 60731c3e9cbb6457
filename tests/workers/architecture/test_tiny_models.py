"""Every architecture either gives the log-probs of transformers' own eager forward, or is refused beforehand.

Trainer and torch engine, in one process: prompts of many lengths in one iteration, prefill in chunks, a second turn
on cached prefixes; before and after an update of the weights.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from tiny_models import CONFIGS, IN_EVERY_RUN, VOCABULARY, make_model
from torch._C._distributed_c10d import HashStore
from transformers import AutoModelForCausalLM, PreTrainedModel

from pearl.types.config import ModelConfig
from pearl.types.messages.rollout import SamplingParams
from pearl.types.weights import BucketSpec, Version
from pearl.workers.architecture.positions import freeze_positions
from pearl.workers.architecture.survey import survey
from pearl.workers.model import build_model
from pearl.workers.rollout.protocol import GenerateRequest
from pearl.workers.rollout.torch_engine.core import EngineCore
from pearl.workers.rollout.torch_engine.settings import EngineSettings
from pearl.workers.training import fsdp
from pearl.workers.training.fsdp import Policy
from pearl.workers.training.packing import pack
from pearl.workers.weight_transfer.checksum import dtype_name, tensor_bytes
from pearl.workers.weight_transfer.snapshot_layout import image_bytes, lay_out

MAX_CONTEXT = 96
CPU = torch.device("cpu")
PROMPTS = (3, 40, 17, 25)
NUM_NEW = 7

Ids = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def all_of_them() -> list[object]:
    return [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


class Pair:
    """Trainer and engine on one model directory, and the model itself."""

    def __init__(self, directory: Path, dtype: str) -> None:
        config = ModelConfig(path=str(directory), dtype=dtype, device="cpu")  # type: ignore[arg-type]
        self.policy = Policy(config, VOCABULARY, 0, CPU, max_context_tokens=MAX_CONTEXT)
        model = build_model(config, VOCABULARY, 0)
        settings = EngineSettings(
            kv_capacity_tokens=2048,
            page_tokens=4,
            prefill_chunk_tokens=16,
            max_context_tokens=MAX_CONTEXT,
            vocabulary_size=VOCABULARY,
        )
        self.core = EngineCore(model, settings)
        self.reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        self.reference.train(False)
        freeze_positions(self.reference, MAX_CONTEXT)
        self.optimizer = fsdp.make_optimizer(self.policy, 1e-2, (0.9, 0.95), 0.0)
        self.is_exact = dtype == "float32"
        self._num_requests = 0

    def publish(self, step: int) -> None:
        served = [(name, fsdp.full_tensor(tensor)) for name, tensor in self.policy.served_tensors()]
        specs = lay_out((name, dtype_name(t.dtype), tuple(t.shape)) for name, t in served)
        data = bytearray(image_bytes(specs))
        for spec, (_, tensor) in zip(specs, served, strict=True):
            data[spec.offset : spec.offset + spec.num_bytes] = tensor_bytes(tensor)
        self.core.begin_update(Version(0, step), specs)
        self.core.update_bucket(BucketSpec(0, len(data), ""), memoryview(data))
        self.core.end_update()
        result = self.reference.load_state_dict(dict(served), strict=False)
        assert not result.unexpected_keys
        self.reference.tie_weights()

    def generate(self, contexts: list[Ids]) -> list[tuple[Ids, npt.NDArray[np.float64]]]:
        """Sampled answers and their log-probs, all requests at once."""
        first = self._num_requests
        for context in contexts:
            params = SamplingParams(NUM_NEW, 1.0, ())
            request = GenerateRequest(
                self._num_requests, context.astype(np.int32), params, self._num_requests
            )
            self.core.submit(request)
            self._num_requests += 1
        while self.core.step():
            pass
        deltas, self.core.deltas = self.core.deltas, []
        assert not [delta.error for delta in deltas if delta.error]
        answers = []
        for attempt in range(first, self._num_requests):
            mine = [delta for delta in deltas if delta.attempt == attempt]
            ids = np.array([i for delta in mine for i in delta.ids])
            answers.append((ids, np.array([p for delta in mine for p in delta.logprobs])))
        return answers

    def expected(self, ids: Ids) -> npt.NDArray[np.float64]:
        """Log-probs of all but the first, by the model alone."""
        with torch.no_grad():
            logits = self.reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        logprobs = logits[:-1, :VOCABULARY].double().log_softmax(-1)
        picked: npt.NDArray[np.float64] = logprobs.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()
        return picked

    def trained(self, sequences: list[Ids]) -> list[npt.NDArray[np.float64]]:
        positions = [np.arange(1, len(ids)) for ids in sequences]
        packed = pack([ids.astype(np.int32) for ids in sequences], positions, CPU)
        with torch.no_grad():
            logprobs = self.policy.score(packed, 1.0).logprobs_M.double().numpy()
        self.policy.reshard()
        return list(np.split(logprobs, np.cumsum([len(ids) - 1 for ids in sequences])[:-1]))

    def update(self, sequences: list[Ids]) -> None:
        positions = [np.arange(1, len(ids)) for ids in sequences]
        packed = pack([ids.astype(np.int32) for ids in sequences], positions, CPU)
        self.policy.backward(-self.policy.score(packed, 1.0).logprobs_M.mean())
        norm, is_done = fsdp.apply_update(self.policy, self.optimizer, 1e-2, 1.0)
        assert is_done
        if self.is_exact:
            assert norm == pytest.approx(self.expected_norm(sequences), rel=1e-3)

    def expected_norm(self, sequences: list[Ids]) -> float:
        """Of the same gradient, by the model alone, one sequence after another."""
        self.reference.zero_grad()
        count = sum(len(ids) - 1 for ids in sequences)
        for ids in sequences:
            tokens = torch.from_numpy(ids)
            logits = self.reference(input_ids=tokens[None], use_cache=False).logits[0, :-1, :VOCABULARY]
            torch.autograd.backward(
                torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum") / count
            )
        squares = [p.grad.square().sum() for p in self.reference.parameters() if p.grad is not None]
        return float(torch.stack(squares).sum().sqrt())


def gaps(pair: Pair, seed: int) -> tuple[list[Ids], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sequences of two turns; |engine - model| of what was generated and |trainer - model| of everything."""
    rng = np.random.default_rng(seed)
    contexts: list[Ids] = [rng.integers(0, VOCABULARY, count) for count in PROMPTS]
    ours, theirs = [], []
    for _ in range(2):
        for index, (ids, logprobs) in enumerate(pair.generate(contexts)):
            sequence = np.concatenate((contexts[index], ids))
            ours.append(logprobs)
            theirs.append(pair.expected(sequence)[-len(ids) :])
            contexts[index] = np.concatenate((sequence, rng.integers(0, VOCABULARY, 5)))
    engine = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    model = np.concatenate([pair.expected(ids) for ids in contexts])
    return contexts, engine, np.abs(np.concatenate(pair.trained(contexts)) - model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # nothing writes into what it returns
@pytest.mark.parametrize("name", all_of_them())
def test_log_probs_are_those_of_transformers_or_the_model_is_refused(
    name: str, tmp_path: Path, world: None
) -> None:
    config = CONFIGS[name]()
    found = survey(config, MAX_CONTEXT)
    make_model(config, tmp_path)
    if found.problems:
        for part in ("trainer", "engine"):
            with pytest.raises(ValueError, match="its ") as refusal:
                _build(part, tmp_path)
            assert found.problems[0] in str(refusal.value)
        return
    pair = Pair(tmp_path, "float32")
    for step in range(2):
        pair.publish(step)
        sequences, engine, trainer = gaps(pair, step)
        assert engine.max() < 1e-4, f"engine, step {step}"
        assert trainer.max() < 1e-4, f"trainer, step {step}"
        pair.update(sequences)


def _build(part: str, directory: Path) -> object:
    config = ModelConfig(path=str(directory), device="cpu")
    if part == "trainer":
        return Policy(config, VOCABULARY, 0, CPU, max_context_tokens=MAX_CONTEXT)
    settings = EngineSettings(max_context_tokens=MAX_CONTEXT)
    return EngineCore(build_model(config, VOCABULARY, 0), settings)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_bfloat16_is_served_and_trained_in_the_same_dtypes(name: str, tmp_path: Path, world: None) -> None:
    make_model(CONFIGS[name](), tmp_path)
    pair = Pair(tmp_path, "bfloat16")
    for step in range(2):
        pair.publish(step)
        sequences, engine, trainer = gaps(pair, step)
        assert np.median(engine) < 0.1, f"engine, step {step}"
        assert np.median(trainer) < 0.1, f"trainer, step {step}"
        pair.update(sequences)
