"""What types and bounds cannot say: settings that must fit each other."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from pearl.config.schema import ConfigError, problems
from pearl.config.suggestions import nearest
from pearl.types import tcp_address
from pearl.types.config import Config, TrainingConfig

ADVANTAGES = ("group", "leave-one-out", "batch")
BUILT_IN_ENVIRONMENTS = ("bugfix", "emulated", "harness", "jsonl", "python-repository")
ROUTERS = ("sticky", "least-loaded", "cache-aware")
OWN_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PROBE_LIMIT_S = 30.0
RATIO = re.compile(r"[1-9][0-9]{0,4}P[1-9][0-9]{0,4}D")


def validate(config: Config) -> None:
    """Raise ConfigError with a line for each value that is out of bounds or does not fit the others."""
    wrong = problems(msgspec.to_builtins(config)) or misfits(config)
    if wrong:
        raise ConfigError("\n".join(wrong))


def misfits(config: Config) -> list[str]:
    """Return a line for each thing that does not fit, in settings that are each within their bounds."""
    rules = (
        _model,
        _data,
        _environment,
        _rollout,
        _training,
        _runtime,
        _elastic,
        _engines,
        _emulated,
        _agreement,
    )
    return [line for rule in rules for line in rule(config)]


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if not model.path:
        yield 'model.path: is empty; give a model directory or "tiny-qwen3"'
    if model.num_heads % model.num_kv_heads:
        yield f"model.num_heads: {model.num_heads} is not a multiple of model.num_kv_heads = {model.num_kv_heads}"
    if model.head_dim % 2:
        yield f"model.head_dim: {model.head_dim} is odd; rotary position embeddings need an even size"


def _data(config: Config) -> Iterator[str]:
    batch, group = config.data.batch_size, config.data.group_size
    if batch % group:
        below, above = batch // group * group, (batch // group + 1) * group
        fits = f"{below} or {above}" if below else f"{above}"
        yield f"data.batch_size: {batch} is not a multiple of data.group_size = {group}; {fits} would be"
    if group == 1:
        yield "data.group_size: 1 teaches nothing, since an advantage is relative to the group; use at least 2"


def _environment(config: Config) -> Iterator[str]:
    name, reward = config.environment.name, config.environment.reward
    if reward and not OWN_NAME.fullmatch(reward):
        yield f'environment.reward: "{reward}" is not "package.module:function"'
    if name in BUILT_IN_ENVIRONMENTS or OWN_NAME.fullmatch(name):
        return
    guess = nearest(name, BUILT_IN_ENVIRONMENTS)
    way_out = f'did you mean "{guess}"?' if guess else f"built in: {', '.join(BUILT_IN_ENVIRONMENTS)}"
    own = '"package.module:Class" or "package.module:rollout"'
    yield f'environment.name: "{name}" is unknown; {way_out} (your own: {own})'


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.router not in ROUTERS and not OWN_NAME.fullmatch(rollout.router):
        names = ", ".join(f'"{name}"' for name in ROUTERS)
        yield (
            f'rollout.router: "{rollout.router}" is not one of {names}, nor a function of your own, '
            '"package.module:function"'
        )
    if rollout.max_new_tokens_per_turn >= rollout.max_context_tokens:
        yield (
            f"rollout.max_new_tokens_per_turn: {rollout.max_new_tokens_per_turn} leaves no room for a prompt in "
            f"rollout.max_context_tokens = {rollout.max_context_tokens}"
        )
    pages = -(-rollout.max_context_tokens // rollout.page_tokens)
    if rollout.kv_capacity_tokens < pages * rollout.page_tokens:
        yield (
            f"rollout.kv_capacity_tokens: {rollout.kv_capacity_tokens} does not hold one trajectory of "
            f"rollout.max_context_tokens = {rollout.max_context_tokens} (whole pages of {rollout.page_tokens}): "
            f"at least {pages * rollout.page_tokens}"
        )
    num_gpus = rollout.num_workers * rollout.gpus_per_worker
    if rollout.reserved_gpus > num_gpus:
        yield (
            f"rollout.reserved_gpus: {rollout.reserved_gpus} is more than the {num_gpus} GPUs of rollout.num_workers = "
            f"{rollout.num_workers}; what is more may join as --pool spot"
        )
    if rollout.reserved_gpus % rollout.gpus_per_worker:
        yield (
            f"rollout.reserved_gpus: {rollout.reserved_gpus} is not a multiple of rollout.gpus_per_worker = "
            f"{rollout.gpus_per_worker}: a worker never spans hosts"
        )
    if rollout.trajectory_deadline_s < rollout.turn_deadline_s:
        yield (
            f"rollout.trajectory_deadline_s: {rollout.trajectory_deadline_s} is less than "
            f"rollout.turn_deadline_s = {rollout.turn_deadline_s}, a single turn's"
        )
    if rollout.frame_period_s > rollout.turn_deadline_s:
        yield (
            f"rollout.frame_period_s: {rollout.frame_period_s} is more than rollout.turn_deadline_s = "
            f"{rollout.turn_deadline_s}: nothing of a turn would be heard before its deadline"
        )


def _training(config: Config) -> Iterator[str]:
    training, warm_start = config.training, config.warm_start
    yield from _objective(training)
    groups = config.data.batch_size // config.data.group_size
    if training.updates_per_step > groups:
        yield (
            f"training.updates_per_step: {training.updates_per_step} is more than the {groups} groups of "
            f"data.batch_size = {config.data.batch_size}"
        )
    if training.engine == "fsdp" and training.tokens_per_micro_batch < config.rollout.max_context_tokens:
        yield (
            f"training.tokens_per_micro_batch: {training.tokens_per_micro_batch} does not hold one trajectory of "
            f"rollout.max_context_tokens = {config.rollout.max_context_tokens}"
        )
    if 0 < warm_start.num_steps < warm_start.warmup_steps:
        yield (
            f"warm_start.warmup_steps: {warm_start.warmup_steps} is more than "
            f"warm_start.num_steps = {warm_start.num_steps}"
        )


def _objective(training: TrainingConfig) -> Iterator[str]:
    if training.correction_low >= training.tis_cap:
        yield (
            f"training.correction_low: {training.correction_low} is not below training.tis_cap = "
            f"{training.tis_cap}, the upper bound"
        )
    if training.advantage not in ADVANTAGES and not OWN_NAME.fullmatch(training.advantage):
        yield (
            f'training.advantage: "{training.advantage}" is unknown; built in: {", ".join(ADVANTAGES)} '
            '(your own: "package.module:function")'
        )
    if training.loss and not OWN_NAME.fullmatch(training.loss):
        yield f'training.loss: "{training.loss}" is not "package.module:function"'
    if training.loss and training.objective != "ppo":
        yield (
            f'training.objective: "{training.objective}" is not used beside training.loss = "{training.loss}"; '
            "leave one of them out"
        )
    if training.kl_estimator == "k1" and training.kl_in == "loss" and training.kl_coefficient:
        yield (
            'training.kl_estimator: "k1" in the loss pulls towards no reference, its gradient is 0 in the mean; '
            'use "k2" or "k3", or training.kl_in = "reward"'
        )
    if training.kl_in == "reward" and not training.kl_coefficient:
        yield 'training.kl_in: "reward" has no effect while training.kl_coefficient = 0'
    if training.reference_reset_every and not training.kl_coefficient:
        yield (
            f"training.reference_reset_every: {training.reference_reset_every} has no effect while "
            "training.kl_coefficient = 0"
        )


def _runtime(config: Config) -> Iterator[str]:
    runtime = config.runtime
    if not _is_tcp(runtime.address):
        yield (
            f'runtime.address: "{runtime.address}" is not tcp://HOST:PORT (port 0 = any free one; an IPv6 address in '
            "brackets)"
        )
    for key in ("heartbeat_timeout_s", "progress_timeout_s", "start_timeout_s", "lease_s"):
        value = _get(config, "runtime", key)
        if value < 2 * runtime.heartbeat_period_s:
            yield (
                f"runtime.{key}: {value} is less than two heartbeats "
                f"(runtime.heartbeat_period_s = {runtime.heartbeat_period_s}): healthy peers would be ended"
            )
    if config.rollout.frame_period_s > runtime.progress_timeout_s / 2:
        yield (
            f"runtime.progress_timeout_s: {runtime.progress_timeout_s} is less than two frames "
            f"(rollout.frame_period_s = {config.rollout.frame_period_s}): healthy workers would count as stuck"
        )
    if config.weights.bucket_deadline_s > runtime.update_timeout_s:
        yield (
            f"weights.bucket_deadline_s: {config.weights.bucket_deadline_s} is more than runtime.update_timeout_s = "
            f"{runtime.update_timeout_s}, a whole update's"
        )


def _elastic(config: Config) -> Iterator[str]:
    elastic = config.elastic
    if elastic.trace and not elastic.inter:
        yield f'elastic.trace: "{elastic.trace}" brings GPUs that nobody uses; set elastic.inter = true'
    if 0 < elastic.preemptible_gpus < config.rollout.gpus_per_worker:
        yield (
            f"elastic.preemptible_gpus: {elastic.preemptible_gpus} are not enough for one worker "
            f"(rollout.gpus_per_worker = {config.rollout.gpus_per_worker})"
        )
    if elastic.mode_threshold < elastic.ratio_threshold:
        yield (
            f"elastic.mode_threshold: {elastic.mode_threshold} is less than elastic.ratio_threshold = "
            f"{elastic.ratio_threshold}; a switch of mode costs more, so it must promise at least as much"
        )
    if elastic.pd not in ("colocated", "adaptive") and not RATIO.fullmatch(elastic.pd):
        yield f'elastic.pd: "{elastic.pd}" is not "colocated", "adaptive" or a ratio such as "3P5D"'


def _engines(config: Config) -> Iterator[str]:
    rollout, training = config.rollout, config.training
    if rollout.engine == "sglang":
        yield from _sglang(config)
    if rollout.engine == "torch" and rollout.gpus_per_worker != 1:
        yield (
            f"rollout.gpus_per_worker: {rollout.gpus_per_worker}: the torch engine runs on one GPU; "
            'use 1, or rollout.engine = "emulated"'
        )
    chosen = {
        "rollout.engine": rollout.engine,
        "training.engine": training.engine,
        "environment.name": config.environment.name,
    }
    others = [key for key, value in chosen.items() if value != "emulated"]
    if 0 < len(others) < len(chosen):
        emulated = " and ".join(f'{key} = "emulated"' for key in chosen if key not in others)
        for key in others:
            yield (
                f'{key}: "{chosen[key]}" does not go with {emulated}: engine, training and environment are '
                "emulated together or not at all"
            )


def _sglang(config: Config) -> Iterator[str]:
    python = config.sglang.python or sys.executable
    if not os.access(python, os.X_OK):
        yield f'sglang.python: "{python}" is no program; name the interpreter that SGLang is installed for'
    elif not _has_sglang(python):
        yield (
            f'rollout.engine: "sglang" is not installed for {python}. On a GPU host: pip install "pearl[sglang]"; on '
            "a CPU host: launch/install-sglang-cpu.sh VENV, then sglang.python=VENV/bin/python"
        )


def _has_sglang(python: str) -> bool:
    """Check for SGLang without importing it, which would take many seconds."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, check=False, timeout=PROBE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


def _emulated(config: Config) -> Iterator[str]:
    if config.rollout.engine != "emulated":
        return
    if config.warm_start.num_steps:
        yield (
            f"warm_start.num_steps: {config.warm_start.num_steps}: an emulated training world has nothing to warm "
            "up; use 0"
        )
    if config.model.device != "cpu":
        yield f'model.device: "{config.model.device}": emulated workers run on no GPU; use "cpu"'


def _agreement(config: Config) -> Iterator[str]:
    agreement, cap = config.agreement, config.training.tis_cap
    if agreement.min_tis_mean >= min(1.0, cap):
        yield (
            f"agreement.min_tis_mean: {agreement.min_tis_mean} would end every run: the mean is at most 1 and "
            f"training.tis_cap = {cap}"
        )


def _is_tcp(address: str) -> bool:
    try:
        tcp_address.parse(address)
    except ValueError:
        return False
    return True


def _get(config: Config, section: str, key: str) -> Any:
    return getattr(getattr(config, section), key)
