"""The job's settings, as typed values. ``pearl.config`` reads them from TOML and refuses what is not here.

Every duration is in seconds and every limit holds at the moment of use.
"""

from typing import Literal

import msgspec

from pearl.types.weights import UpdateMode


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


class RunConfig(Section, frozen=True):
    seed: int = 0
    num_steps: int = 40
    run_root: str = "runs"  # new run directories are made here when --run-dir is not given
    stop_at_reward: float | None = None  # end early once a step's mean reward reaches this


class ModelConfig(Section, frozen=True):
    """``path`` is a ``transformers`` model directory, or "tiny-qwen3" for the built-in random model."""

    path: str = "tiny-qwen3"
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_layers: int = 2  # this and the next six: tiny-qwen3 only
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn_size: int = 192
    initializer_range: float = 0.08
    device: Literal["auto", "cpu", "cuda"] = "auto"


class DataConfig(Section, frozen=True):
    """A step trains ``batch_size`` trajectories: ``batch_size / group_size`` prompts, ``group_size`` each."""

    batch_size: int = 192
    group_size: int = 16
    num_epochs: int = 1  # over the environment's train split, when that is finite


class EnvironmentConfig(Section, frozen=True):
    name: str = "bugfix"  # built-in name, "package.module:Class" or "package.module:rollout"
    options: dict[str, int | float | str | bool] = {}
    num_workers: int = 1
    max_turns: int = 6
    reset_timeout_s: float = 30.0
    step_timeout_s: float = 30.0
    max_observation_tokens: int = 4096  # longer observations are cut by the environment worker, with a marker
    max_failures: int = 2  # restarts of a trajectory after infrastructure failures before it is masked
    num_evaluation_tasks: int = 200  # 0 = no evaluation


class RolloutConfig(Section, frozen=True):
    engine: Literal["torch", "emulated", "sglang"] = "torch"
    num_workers: int = 2
    gpus_per_worker: int = 1  # tensor parallel degree inside a worker
    router: Literal["sticky", "least-loaded", "cache-aware"] = "cache-aware"
    start: Literal["early", "strict"] = "early"
    max_in_flight: int = 0  # trajectories at once; 0 = batch_size
    max_requests_per_worker: int = 128
    staleness_bound: int = 1  # 0 = synchronous
    temperature: float = 1.0
    max_new_tokens_per_turn: int = 4
    max_context_tokens: int = 256  # prompt, answers and observations of a whole trajectory
    update_mode: UpdateMode = "interrupt"
    partial_rollout: bool = True  # off: an interrupted turn's trajectory is restarted, and counted
    turn_deadline_s: float = 120.0
    trajectory_deadline_s: float = 600.0
    kv_capacity_tokens: int = 65536  # a worker
    prefill_chunk_tokens: int = 512
    page_tokens: int = 16
    frame_period_s: float = 0.02
    frame_iterations: int = 32


class TrainingConfig(Section, frozen=True):
    engine: Literal["fsdp", "emulated"] = "fsdp"
    num_ranks: int = 1
    learning_rate: float = 3e-4
    warmup_steps: int = 0  # linear
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"  # gspo: clipped by trajectory; cispo: clipped weight
    loss: str = (
        ""  # own "package.module:function" in place of objective and correction; see docs/objectives.md
    )
    loss_aggregation: Literal["token", "trajectory", "constant", "prompt"] = "token"  # what the mean is over
    advantage: str = "group"  # "group", "leave-one-out", "batch", or own "package.module:function"
    tis_cap: float = 2.0  # upper bound of the importance ratio between training and rollout log-probs
    correction_low: float = 0.0  # lower bound of that ratio
    correction_level: Literal["token", "sequence", "geometric", "none"] = "token"  # of what the ratio is
    correction_kind: Literal["truncate", "mask"] = "truncate"  # out of bounds: the bound, or no loss
    entropy_coefficient: float = 0.0  # of a bonus, per token
    kl_coefficient: float = 0.0  # against the weights RL began with
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"  # reward: a trajectory's sum is taken from its reward
    reference_reset_every: int = 0  # steps after which the KL term is against the weights of then; 0 = never
    updates_per_step: int = 1  # optimizer steps a batch; groups are dealt to them in prompt order
    normalize_by_std: bool = True  # group advantage / (std + 1e-6); False = mean only
    tokens_per_micro_batch: int = 8192
    activation_checkpointing: bool = True  # layers are computed again in the backward pass: memory for time
    checkpoint_every: int = 1  # steps
    keep_checkpoints: int = 2
    shuffle_advantages: bool = False  # control experiment: nothing must be learnt


class WarmStartConfig(Section, frozen=True):
    """Supervised start from the environment's expert; ``num_steps = 0`` = none."""

    num_steps: int = 150
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    num_demonstrations: int = 4096


class WeightsConfig(Section, frozen=True):
    transport: Literal["auto", "mapped", "link"] = "auto"  # auto: mapped on the source's host, else links
    bucket_bytes: int = 4 << 20
    bucket_deadline_s: float = 10.0


class RuntimeConfig(Section, frozen=True):
    address: str = "tcp://127.0.0.1:0"  # where the coordinator listens; port 0 = any free one
    start_timeout_s: float = 120.0  # a peer from its start to ready
    heartbeat_period_s: float = 0.5
    heartbeat_timeout_s: float = 10.0  # silent for longer = dead
    progress_timeout_s: float = 60.0  # has work, is not busy, makes no progress = stuck
    update_timeout_s: float = 60.0
    train_timeout_s: float = 600.0
    lease_s: float = 10.0  # a peer that has not heard from the coordinator for longer ends itself
    queue_messages: int = 4096  # bound of every queue to and from a peer
    max_frame_bytes: int = 64 << 20
    max_restarts: int = 5  # of one slot or of the training world within restart_window_s; more ends the run
    restart_window_s: float = 300.0


class ElasticConfig(Section, frozen=True):
    """Policies are data: three axes (inter, borrow, pd), and what their gates start from."""

    inter: bool = False  # preemptible GPUs that arrive are used; off: arrivals are refused
    borrow: Literal["never", "always", "gated"] = "never"  # of idle training GPUs
    pd: str = "colocated"  # "colocated", a fixed allocation's ratio like "3P5D", or "adaptive"
    preemptible_gpus: int = 0  # of the coordinator's own host that are absent until they arrive
    trace: str = ""  # file of arrivals and reclaims, played into the run
    trace_speed: float = 1.0  # times faster than recorded
    release_limit_s: float = 10.0  # an overlap worker that has not let go by then is killed
    activation_prior_s: float = 0.5  # cost of lending GPUs until it is measured; optimistic
    return_prior_s: float = 0.5
    preparation_prior_s: float = 5.0  # cost of a new worker until it is measured
    finalization_prior_s: float = 0.5
    smoothing: float = 0.3  # weight of the newest measurement in moving averages
    verify_state: bool = True  # digest of the training state before and after it is lent
    makespan: Literal["closed-form", "fluid", "network"] = "closed-form"
    ratio_threshold: float = 0.05  # relative gain that a switch of ratio must promise
    mode_threshold: float = 0.10  # and a switch between colocated and disaggregated


class EmulatedConfig(Section, frozen=True):
    """Timing of the emulated engine, training world and environment: no torch, real time, real processes.

    An iteration takes A + b * decoding + t_prefill * prefilled tokens, times lognormal noise of the given sigma.
    """

    launcher: Literal["process", "task"] = "process"  # a process a worker, or all in the node agent's process
    prefill_seconds_per_token: float = 20e-6
    decode_fixed_seconds: float = 6e-3
    decode_seconds_per_seq: float = 0.2e-3
    noise: float = 0.05
    length_spread: float = (
        0.2  # lognormal, of answers' lengths within a group, around what the environment asks for
    )
    start_seconds: float = 1.0  # a worker's process to ready
    update_seconds: float = 0.2
    activation_seconds: float = 0.3  # memory back; taking the weights comes on top
    release_seconds: float = 0.2
    offload_seconds: float = 0.2
    restore_seconds: float = 0.2
    train_seconds: float = 2.0
    kv_bandwidth_bytes_per_s: float = 50e9
    kv_bytes_per_token: float = 147456.0


class SglangConfig(Section, frozen=True):
    """Of ``rollout.engine = "sglang"``: each worker runs a server of its own."""

    python: str = ""  # interpreter that SGLang is installed for; "" = that of the worker
    transfer: Literal["auto", "mooncake", "mooncake_tcp", "nixl"] = "auto"
    """Of KV between halves: RDMA, TCP, UCX; auto = mooncake, by TCP where there is no GPU."""
    stream_interval: int = (
        1  # tokens of a request that are told at once; more costs less, and loses more in a crash
    )
    options: dict[
        str, int | float | str | bool
    ] = {}  # more arguments of its server, e.g. attention-backend = "fa3"


class AgreementConfig(Section, frozen=True):
    """Whether trainer and rollout engine compute the same model, the one that plain ``transformers`` computes."""

    at_start: bool = True
    """Before the first step both are compared with ``transformers`` on short and long prompts. Off: whatever both get
    wrong alike, masks, positions or a kind of layer, is not found, since they agree with each other."""
    max_model_bytes: int = (
        8 << 30
    )  # of weights; a larger model is not compared at the start, and that is said
    max_compared_tokens: int = 1024  # of the long prompt
    max_logprob_gap: float | None = None
    """Mean |rollout - training log-prob|, in nats, of the tokens made by the version being trained; above it the run
    ends. None = 0.001 in float32, 0.1 in bfloat16."""
    min_tis_mean: float = 0.3
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
