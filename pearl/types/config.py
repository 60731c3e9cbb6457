"""The job's settings, as typed values. ``pearl.config`` reads them from TOML and refuses what is not here.

Every duration is in seconds, every limit holds at the moment of use, and every number is bounded both ways: what is
outside is a slip of the finger, or would fill the host or wait for ever.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pearl.types.weights import UpdateMode

DAY_S = 86_400.0
Limit = Annotated[float, Meta(ge=1e-3, le=DAY_S)]
"""Seconds that something may take at most."""
LongLimit = Annotated[float, Meta(ge=1e-3, le=30 * DAY_S)]
Cost = Annotated[float, Meta(ge=0, le=DAY_S)]
"""Seconds that something takes."""
Beta = Annotated[float, Meta(ge=0, lt=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


class RunConfig(Section, frozen=True):
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    num_steps: Annotated[int, Meta(ge=1, le=10_000_000)] = 40
    run_root: str = "runs"  # new run directories are made here when --run-dir is not given
    # end early once a step's mean reward reaches this
    stop_at_reward: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    # of each step and evaluation round, kept as text in samples.jsonl
    num_samples: Annotated[int, Meta(ge=0, le=1024)] = 4


class ModelConfig(Section, frozen=True):
    """``path`` is a ``transformers`` model directory, or "tiny-qwen3" for the built-in random model."""

    path: str = "tiny-qwen3"
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_layers: Annotated[int, Meta(ge=1, le=1024)] = 2  # this and the next six: tiny-qwen3 only
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 17)] = 64
    num_heads: Annotated[int, Meta(ge=1, le=4096)] = 4
    num_kv_heads: Annotated[int, Meta(ge=1, le=4096)] = 2
    head_dim: Annotated[int, Meta(ge=1, le=4096)] = 16
    ffn_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 192
    initializer_range: Annotated[float, Meta(ge=1e-8, le=10)] = 0.08
    device: Literal["auto", "cpu", "cuda"] = "auto"


class DataConfig(Section, frozen=True):
    """A step trains ``batch_size`` trajectories: ``batch_size / group_size`` prompts, ``group_size`` each."""

    batch_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 192
    group_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    # over the environment's train split, when that is finite
    num_epochs: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class EnvironmentConfig(Section, frozen=True):
    name: str = "bugfix"  # built-in name, "package.module:Class" or "package.module:rollout"
    options: dict[str, int | float | str | bool] = {}
    reward: str = ""  # "package.module:function" that takes the place of the environment's own; "" = none
    num_workers: Annotated[int, Meta(ge=1, le=4096)] = 1
    max_turns: Annotated[int, Meta(ge=1, le=100_000)] = 6
    reset_timeout_s: Limit = 30.0
    step_timeout_s: Limit = 30.0
    # longer observations are cut by the environment worker, with a marker
    max_observation_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    # restarts of a trajectory after infrastructure failures before it is masked
    max_failures: Annotated[int, Meta(ge=0, le=1000)] = 2
    num_evaluation_tasks: Annotated[int, Meta(ge=0, le=1_000_000)] = 200  # 0 = no evaluation


class RolloutConfig(Section, frozen=True):
    engine: Literal["torch", "emulated", "sglang"] = "torch"
    num_workers: Annotated[int, Meta(ge=1, le=1 << 16)] = 2
    # of the workers' GPUs, so many are on reserved hosts (pearl agent --pool rollout), the rest on the coordinator's
    reserved_gpus: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    gpus_per_worker: Annotated[int, Meta(ge=1, le=1024)] = 1  # tensor parallel degree inside a worker
    # "sticky", "least-loaded", "cache-aware", or a function of your own, "package.module:function"
    router: str = "cache-aware"
    start: Literal["early", "strict"] = "early"
    max_in_flight: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # trajectories at once; 0 = batch_size
    max_requests_per_worker: Annotated[int, Meta(ge=1, le=1 << 16)] = 128
    staleness_bound: Annotated[int, Meta(ge=0, le=1000)] = 1  # 0 = synchronous
    temperature: Annotated[float, Meta(ge=1e-4, le=1e4)] = 1.0
    max_new_tokens_per_turn: Annotated[int, Meta(ge=1, le=1 << 24)] = 4
    # prompt, answers and observations of a whole trajectory
    max_context_tokens: Annotated[int, Meta(ge=2, le=1 << 26)] = 256
    update_mode: UpdateMode = "interrupt"
    partial_rollout: bool = True  # off: an interrupted turn's trajectory is restarted, and counted
    turn_deadline_s: LongLimit = 120.0
    trajectory_deadline_s: LongLimit = 600.0
    kv_capacity_tokens: Annotated[int, Meta(ge=1, le=1 << 36)] = 65536  # a worker
    prefill_chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 512
    page_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    frame_period_s: Annotated[float, Meta(ge=1e-4, le=60)] = 0.02
    frame_iterations: Annotated[int, Meta(ge=1, le=1 << 20)] = 32


class TrainingConfig(Section, frozen=True):
    engine: Literal["fsdp", "emulated"] = "fsdp"
    num_ranks: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    learning_rate: Annotated[float, Meta(ge=1e-12, le=10)] = 3e-4
    warmup_steps: Annotated[int, Meta(ge=0, le=10_000_000)] = 0  # linear
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    weight_decay: Annotated[float, Meta(ge=0, le=100)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Meta(ge=1e-9, le=1e9)] = 1.0
    clip_low: Annotated[float, Meta(ge=1e-6, lt=1)] = 0.2
    clip_high: Annotated[float, Meta(ge=1e-6, le=1000)] = 0.28
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"  # gspo: clipped by trajectory; cispo: clipped weight
    loss: str = ""  # own "package.module:function" in place of objective and correction
    loss_aggregation: Literal["token", "trajectory", "constant", "prompt"] = "token"  # what the mean is over
    advantage: str = "group"  # "group", "leave-one-out", "batch", or own "package.module:function"
    # upper bound of the importance ratio between training and rollout log-probs
    tis_cap: Annotated[float, Meta(ge=1e-3, le=1e6)] = 2.0
    correction_low: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # lower bound of that ratio
    correction_level: Literal["token", "sequence", "geometric", "none"] = "token"  # of what the ratio is
    correction_kind: Literal["truncate", "mask"] = "truncate"  # out of bounds: the bound, or no loss
    entropy_coefficient: Annotated[float, Meta(ge=0, le=1000)] = 0.0  # of a bonus, per token
    kl_coefficient: Annotated[float, Meta(ge=0, le=1000)] = 0.0  # against the weights RL began with
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"  # reward: a trajectory's sum is taken from its reward
    # steps after which the KL term is against the weights of then; 0 = never
    reference_reset_every: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    # optimizer steps a batch; groups are dealt to them in prompt order
    updates_per_step: Annotated[int, Meta(ge=1, le=10_000)] = 1
    normalize_by_std: bool = True  # group advantage / (std + 1e-6); False = mean only
    tokens_per_micro_batch: Annotated[int, Meta(ge=1, le=1 << 30)] = 8192
    activation_checkpointing: bool = True  # layers are computed again in the backward pass: memory for time
    checkpoint_every: Annotated[int, Meta(ge=1, le=10_000_000)] = 1  # steps
    # minutes after which the next step is saved too, whatever checkpoint_every says; 0 = by steps alone
    checkpoint_every_minutes: Annotated[float, Meta(ge=0, le=100_000)] = 0.0
    keep_checkpoints: Annotated[int, Meta(ge=1, le=10_000)] = 2
    shuffle_advantages: bool = False  # control experiment: nothing must be learnt


class WarmStartConfig(Section, frozen=True):
    """Supervised start from the environment's expert; ``num_steps = 0`` = none."""

    num_steps: Annotated[int, Meta(ge=0, le=10_000_000)] = 150
    batch_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    learning_rate: Annotated[float, Meta(ge=1e-12, le=10)] = 3e-3
    warmup_steps: Annotated[int, Meta(ge=0, le=10_000_000)] = 20
    num_demonstrations: Annotated[int, Meta(ge=1, le=10_000_000)] = 4096


class WeightsConfig(Section, frozen=True):
    transport: Literal["auto", "mapped", "link"] = "auto"  # auto: mapped on the source's host, else links
    bucket_bytes: Annotated[int, Meta(ge=4096, le=1 << 32)] = 4 << 20
    bucket_deadline_s: Limit = 10.0


class RuntimeConfig(Section, frozen=True):
    address: str = "tcp://127.0.0.1:0"  # where the coordinator listens; port 0 = any free one
    start_timeout_s: Limit = 120.0  # a peer from its start to ready
    heartbeat_period_s: Annotated[float, Meta(ge=0.01, le=3600)] = 0.5
    heartbeat_timeout_s: Limit = 10.0  # silent for longer = dead
    progress_timeout_s: Limit = 60.0  # has work, is not busy, makes no progress = stuck
    update_timeout_s: Limit = 60.0
    train_timeout_s: LongLimit = 600.0
    lease_s: Limit = 10.0  # a peer that has not heard from the coordinator for longer ends itself
    queue_messages: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096  # bound of every queue to and from a peer
    max_frame_bytes: Annotated[int, Meta(ge=1 << 20, le=(1 << 31) - 1)] = 64 << 20
    # of one slot or of the training world within restart_window_s; more ends the run
    max_restarts: Annotated[int, Meta(ge=0, le=10_000)] = 5
    restart_window_s: LongLimit = 300.0
    # reserved hosts are awaited for so long, at the start and when they are lost
    reserved_timeout_s: LongLimit = 600.0
    # torch workers are forked from one process a host that has imported what they need: auto = those without GPUs, on =
    # all, off = none
    prepared_processes: Literal["auto", "on", "off"] = "auto"


class ElasticConfig(Section, frozen=True):
    """Policies are data: three axes (inter, borrow, pd), and what their gates start from."""

    inter: bool = False  # preemptible GPUs that arrive are used; off: arrivals are refused
    borrow: Literal["never", "always", "gated"] = "never"  # of idle training GPUs
    pd: str = "colocated"  # "colocated", a fixed allocation's ratio like "3P5D", or "adaptive"
    # of the coordinator's own host that are absent until they arrive
    preemptible_gpus: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    trace: str = ""  # file of arrivals and reclaims, played into the run
    trace_speed: Annotated[float, Meta(ge=1e-3, le=1e6)] = 1.0  # times faster than recorded
    release_limit_s: Limit = 10.0  # an overlap worker that has not let go by then is killed
    activation_prior_s: Cost = 0.5  # cost of lending GPUs until it is measured; optimistic
    return_prior_s: Cost = 0.5
    preparation_prior_s: Cost = 5.0  # cost of a new worker until it is measured
    finalization_prior_s: Cost = 0.5
    # weight of the newest measurement in moving averages
    smoothing: Annotated[float, Meta(ge=1e-6, le=1)] = 0.3
    verify_state: bool = True  # digest of the training state before and after it is lent
    makespan: Literal["closed-form", "fluid", "network"] = "closed-form"
    # relative gain that a switch of ratio must promise
    ratio_threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    # and a switch between colocated and disaggregated
    mode_threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.10


class EmulatedConfig(Section, frozen=True):
    """Timing of the emulated engine, training world and environment: no torch, real time, real processes.

    An iteration takes A + b * decoding + t_prefill * prefilled tokens, times lognormal noise of the given sigma.
    """

    prefill_seconds_per_token: Cost = 20e-6
    decode_fixed_seconds: Annotated[float, Meta(ge=1e-6, le=3600)] = 6e-3
    decode_seconds_per_seq: Cost = 0.2e-3
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.05
    # lognormal, of answers' lengths within a group, around what the environment asks for
    length_spread: Annotated[float, Meta(ge=0, le=2)] = 0.2
    start_seconds: Cost = 1.0  # a worker's process to ready
    update_seconds: Cost = 0.2
    activation_seconds: Cost = 0.3  # memory back; taking the weights comes on top
    release_seconds: Cost = 0.2
    offload_seconds: Cost = 0.2
    restore_seconds: Cost = 0.2
    train_seconds: Cost = 2.0
    kv_bandwidth_bytes_per_s: Annotated[float, Meta(ge=1, le=1e15)] = 50e9
    kv_bytes_per_token: Annotated[float, Meta(ge=0, le=1e12)] = 147456.0


class SglangConfig(Section, frozen=True):
    """Of ``rollout.engine = "sglang"``: each worker runs a server of its own."""

    python: str = ""  # interpreter that SGLang is installed for; "" = that of the worker
    transfer: Literal["auto", "mooncake", "mooncake_tcp", "nixl"] = "auto"
    """Of KV between halves: RDMA, TCP, UCX; auto = mooncake, by TCP where there is no GPU."""
    # tokens of a request that are reported together; more costs less, and loses more in a crash
    stream_interval: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    options: dict[
        str, int | float | str | bool
    ] = {}  # more arguments of its server, e.g. attention-backend = "fa3"


class AgreementConfig(Section, frozen=True):
    """Whether trainer and rollout engine compute the same model, the one that plain ``transformers`` computes."""

    at_start: bool = True
    """Before the first step both are compared with ``transformers`` on short and long prompts. Off: whatever both get
    wrong alike, masks, positions or a kind of layer, is not found, since they agree with each other."""
    max_model_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 8 << 30
    """Of weights; a larger model is not compared at the start, and a notice says so."""
    max_compared_tokens: Annotated[int, Meta(ge=8, le=1 << 20)] = 1024  # of the long prompt
    max_logprob_gap: Annotated[float, Meta(ge=1e-9, le=1000)] | None = None
    """Mean |rollout - training log-prob|, in nats, of the tokens made by the version being trained; above it the run
    ends. None = 0.001 in float32, 0.1 in bfloat16."""
    min_tis_mean: Annotated[float, Meta(ge=0, le=1)] = 0.3
    """Mean importance weight of all trained tokens, near 1 however old they are; below it the run ends. 0 = never."""


class Config(Section, frozen=True):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    weights: WeightsConfig = WeightsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    elastic: ElasticConfig = ElasticConfig()
    emulated: EmulatedConfig = EmulatedConfig()
    sglang: SglangConfig = SglangConfig()
    agreement: AgreementConfig = AgreementConfig()
