"""Settings: what is right is read back whole, what is wrong is refused with the way out."""

import re
from pathlib import Path

import msgspec
import pytest

from pearl.config import ConfigError, load, resolved_json, resolved_toml, validate
from pearl.config.schema import KEYS, problems
from pearl.types.config import Config, DataConfig

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), overrides)
    return str(caught.value)


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")) == Config()


def test_values_and_overrides_of_every_type(tmp_path: Path) -> None:
    text = "[rollout]\ntemperature = 1\n[environment.options]\nnum_lines = 6\n"
    config = load(
        write(tmp_path, text),
        [
            "run.num_steps=7",
            "run.stop_at_reward=0.9",
            "training.learning_rate=1e-4",
            "training.betas=[0.8, 0.9]",
            "rollout.partial_rollout=false",
            "rollout.router=sticky",
            "model.path=2024",
            'run.run_root="my runs"',
            "environment.options.num_bugs=2",
        ],
    )
    assert (config.run.num_steps, config.run.stop_at_reward, config.run.run_root) == (7, 0.9, "my runs")
    assert config.rollout.temperature == 1.0
    assert config.training.learning_rate == 1e-4
    assert config.training.betas == (0.8, 0.9)
    assert config.rollout.partial_rollout is False
    assert config.rollout.router == "sticky"
    assert config.model.path == "2024"
    assert config.environment.options == {"num_lines": 6, "num_bugs": 2}


def test_a_later_override_wins_and_none_unsets(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nstop_at_reward = 0.5\n")
    assert load(path, ["run.stop_at_reward=0.7", "run.stop_at_reward=none"]).run.stop_at_reward is None


def test_resolved_copy_reads_back_equal(tmp_path: Path) -> None:
    config = load(
        write(tmp_path, ""),
        ['environment.options.text=a "b"\\n', "training.learning_rate=1e-5", "run.seed=3"],
    )
    assert load(write(tmp_path, resolved_toml(config))) == config
    assert '"stop_at_reward":null' in resolved_json(config)


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    assert load(write(tmp_path, "\ufeff[run]\r\nseed = 5\r\n")).run.seed == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[rollout]\nmax_stalenes = 1",
            "rollout.max_stalenes: unknown key; did you mean rollout.staleness_bound?",
        ),
        ("[rollout]\nstalenes_bound = 1", "did you mean rollout.staleness_bound?"),
        ("[rollout]\nstaleness-bound = 1", "did you mean rollout.staleness_bound?"),
        ("[rollout]\nTemperature = 1", "did you mean rollout.temperature?"),
        ("[training]\nbatch_sise = 1", "did you mean"),
        ("[rollout]\ngroup_size = 8", "it belongs to another section: data.group_size"),
        ("[rollout]\nlearning-rate = 1", "training.learning_rate or warm_start.learning_rate"),
        ("group_size = 8", "keys live in sections; write data.group_size"),
        ("[rolout]\ntemperature = 1", "rolout: unknown section; did you mean [rollout]?"),
        ("[warm-start]\nnum_steps = 1", "did you mean [warm_start]?"),
        ("[zzz]\nq = 1", "sections are run, model"),
        ("[run]\nzzz = 1", "keys of [run] are seed, num_steps"),
        ("rollout = 3", "rollout: is a section, not a value"),
    ],
)
@pytest.mark.scenario("CF-01")
def test_wrong_keys_are_refused_with_the_nearest(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    assert said in message
    assert "job.toml" in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_stalenes=1", "did you mean rollout.staleness_bound?"),
        ("rollout.group_size=8", "it belongs to another section: data.group_size"),
        ("rollout.staleness-bound=1", "did you mean rollout.staleness_bound?"),
        ("group_size=8", "write data.group_size"),
        ("rollout.temperature.x=1", 'rollout.temperature: {"x":1} is not a number'),
        ("rollout.temperature", "write section.key=value"),
        ("rollout.temperature=", "write section.key=value"),
        (".temperature=1", "write section.key=value"),
        ("rollout.temperature=1\nrouter = 2", "is not a number"),
        ("runtime.prepared_processes=yes", '"yes" is not one of "auto", "on", "off"'),
    ],
)
@pytest.mark.scenario("CF-01")
def test_wrong_overrides_are_refused_alike(tmp_path: Path, override: str, said: str) -> None:
    message = refusal(tmp_path, "", override)
    assert said in message
    assert message.startswith("override ")


@pytest.mark.scenario("CF-01")
def test_environment_variables_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_ROLLOUT_STALENESS_BOUND", "0")
    assert load(write(tmp_path, "")).rollout.staleness_bound == 1


@pytest.mark.scenario("CF-01")
def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[run]\nsead = 1\nnum_steps = 1.5\n", "data.group=4")
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.num_steps=many", 'run.num_steps: "many" is not an integer'),
        ("run.num_steps=true", "run.num_steps: true is not an integer"),
        ("rollout.temperature=hot", 'rollout.temperature: "hot" is not a number'),
        ("rollout.temperature=inf", "rollout.temperature: inf is not a finite number"),
        ("run.stop_at_reward=nan", "run.stop_at_reward: nan is not a finite number"),
        ("run.stop_at_reward=high", '"high" is not a number or "none"'),
        ("rollout.router=stiky", '"stiky" is not one of "sticky", "least-loaded", "cache-aware"'),
        ("training.betas=[0.9]", "[0.9] is not an array of 2 values, each a number"),
        ("rollout.partial_rollout=1", "1 is not true or false"),
        ("environment.options=3", "3 is not a table"),
        ("environment.options.x=[1]", "environment.options.x: [1] is not an integer or a number or"),
        ("run.seed=1979-05-27", "is not an integer"),
    ],
)
def test_wrong_types_name_key_value_and_expectation(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, "", override)


EMULATED = (
    "rollout.engine=emulated",
    "training.engine=emulated",
    "environment.name=emulated",
    "model.device=cpu",
    "warm_start.num_steps=0",
)


def test_mistakes_of_every_sort_are_named_in_one_round(tmp_path: Path) -> None:
    text = "[training]\nlearning_rate = 'fast'\nclip_low = 1.5\n[data]\nbatch_size = 0\ngroup_size = 3\n"
    said = refusal(
        tmp_path, text, "run.num_step=3", "rollout.max_new_tokens_per_turn=100000", "elastic.pd=many"
    )
    lines = said.splitlines()
    for beginning in (
        "job.toml: training.learning_rate",
        "run.num_step: unknown key",
        "data.batch_size: 0",
        "training.clip_low: 1.5",
        "rollout.max_new_tokens_per_turn: 100000",
        "elastic.pd",
    ):
        assert sum(beginning in line for line in lines) == 1, (beginning, said)
    assert len(lines) == 6, "nothing is said of values that are not the person's"


def test_nothing_is_an_empty_text(tmp_path: Path) -> None:
    job = write(tmp_path, '[elastic]\ninter = true\ntrace = "a.jsonl"\n')
    assert load(job, ["elastic.trace="]).elastic.trace == ""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data.batch_size=20"],
            "data.batch_size: 20 is not a multiple of data.group_size = 16; 16 or 32 would be",
        ),
        (["data.batch_size=8"], "; 16 would be"),
        (["data.group_size=1"], "use at least 2"),
        (["rollout.staleness_bound=-1"], "rollout.staleness_bound: -1 is less than 0"),
        (["rollout.temperature=0"], "rollout.temperature: 0 is less than 0.0001"),
        pytest.param(
            ["rollout.kv_capacity_tokens=255"],
            "does not hold one trajectory",
            id="pd_04_kv_for_no_trajectory",
        ),
        (["rollout.max_context_tokens=250", "rollout.kv_capacity_tokens=251"], "at least 256"),
        (["rollout.max_new_tokens_per_turn=256"], "leaves no room for a prompt"),
        (
            ["rollout.reserved_gpus=3"],
            "rollout.reserved_gpus: 3 is more than the 2 GPUs of rollout.num_workers = 2",
        ),
        (
            ["rollout.reserved_gpus=3", "rollout.gpus_per_worker=2"],
            "rollout.reserved_gpus: 3 is not a multiple of rollout.gpus_per_worker = 2",
        ),
        (["rollout.reserved_gpus=-1"], "rollout.reserved_gpus"),
        (["runtime.reserved_timeout_s=0"], "runtime.reserved_timeout_s"),
        (["rollout.trajectory_deadline_s=1"], "less than rollout.turn_deadline_s"),
        (["training.tokens_per_micro_batch=100"], "does not hold one trajectory"),
        (["training.checkpoint_every_minutes=-1"], "training.checkpoint_every_minutes: -1 is less than 0"),
        (["training.updates_per_step=13"], "more than the 12 groups"),
        (["training.betas=[0.9, 1.0]"], "training.betas: 1.0 must be less than 1"),
        (["training.clip_low=1.0"], "training.clip_low"),
        (["training.correction_low=2.5"], "training.correction_low: 2.5 is not below training.tis_cap = 2.0"),
        (["training.correction_low=-1"], "training.correction_low"),
        (["training.entropy_coefficient=-1"], "training.entropy_coefficient"),
        (["training.advantage=rloo"], "built in: group, leave-one-out, batch"),
        (["training.loss=mine"], 'is not "package.module:function"'),
        (["training.loss=my.losses:f", "training.objective=gspo"], "is not used beside training.loss"),
        (["training.kl_estimator=k1", "training.kl_coefficient=0.1"], 'use "k2" or "k3"'),
        (["training.kl_in=reward"], "has no effect while training.kl_coefficient = 0"),
        (["training.reference_reset_every=5"], "training.reference_reset_every: 5 has no effect"),
        (["agreement.max_logprob_gap=0.0"], "agreement.max_logprob_gap: 0.0 is less than 1e-09"),
        (["agreement.min_tis_mean=1.0"], "agreement.min_tis_mean: 1.0 would end every run"),
        (["agreement.min_tis_mean=0.5", "training.tis_cap=0.5"], "training.tis_cap = 0.5"),
        (["agreement.max_compared_tokens=7"], "7 is less than 8"),
        (["warm_start.num_steps=10"], "warm_start.warmup_steps: 20 is more than warm_start.num_steps = 10"),
        (["model.num_kv_heads=3"], "model.num_heads: 4 is not a multiple"),
        (["model.head_dim=7"], "is odd"),
        (['model.path=""'], "model.path: is empty"),
        (["environment.name=bugfx"], 'did you mean "bugfix"?'),
        (["environment.name=zork"], "built in: bugfix"),
        (["runtime.address=localhost:3"], "is not tcp://HOST:PORT"),
        (["runtime.address=tcp://h:99999"], "is not tcp://HOST:PORT"),
        (["runtime.heartbeat_timeout_s=0.6"], "less than two heartbeats"),
        ([f"run.seed={10**400}"], "does not fit in 63 bits"),
        ([f"run.seed={'9' * 5000}"], "is not an integer"),
        (["run.seed=9223372036854775808"], "does not fit in 63 bits"),
        (["rollout.engine=sglang", "sglang.python=/none"], 'sglang.python: "/none" is no program'),
        (["rollout.engine=sglang", "sglang.python=/bin/false"], "is not installed for /bin/false"),
        (["rollout.engine=sglang", "sglang.python=/bin/false"], "launch/install-sglang-cpu.sh VENV"),
        (["rollout.gpus_per_worker=2"], "the torch engine runs on one GPU"),
        (["rollout.engine=emulated"], 'training.engine: "fsdp" does not go with rollout.engine = "emulated"'),
        (["environment.name=emulated"], 'rollout.engine: "torch" does not go with environment.name'),
        (["training.engine=emulated"], "together or not at all"),
        ([*EMULATED, "warm_start.num_steps=5"], "has nothing to warm up; use 0"),
        ([*EMULATED, "model.device=auto"], 'run on no GPU; use "cpu"'),
        ([*EMULATED, "emulated.launcher=task"], "emulated.launcher: "),
        ([*EMULATED, "emulated.noise=2"], "emulated.noise"),
        (["emulated.train_seconds=-1"], "emulated.train_seconds: -1 is less than 0"),
        (["emulated.decode_fixed_seconds=0"], "emulated.decode_fixed_seconds: 0 is less than 1e-06"),
        (["elastic.pd=often"], "elastic.pd"),
        (["elastic.pd=0P5D"], 'a ratio such as "3P5D"'),
        (["elastic.trace=t.csv"], "elastic.trace"),
        (["elastic.smoothing=1.5"], "elastic.smoothing: 1.5 is more than 1"),
        (["elastic.trace_speed=0"], "elastic.trace_speed: 0 is less than 0.001"),
        (["elastic.mode_threshold=0.01"], "must promise at least as much"),
        (["elastic.preemptible_gpus=100000000"], "elastic.preemptible_gpus: 100000000 is more than 65536"),
        (["rollout.num_workers=100000000"], "rollout.num_workers: 100000000 is more than 65536"),
        (
            [
                "rollout.gpus_per_worker=3",
                "elastic.preemptible_gpus=2",
                'rollout.engine="emulated"',
                'training.engine="emulated"',
                'environment.name="emulated"',
            ],
            "elastic.preemptible_gpus: 2 are not enough for one worker (rollout.gpus_per_worker = 3)",
        ),
        (["elastic.preemptible_gpus=-1"], "elastic.preemptible_gpus: -1 is less than 0"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, overrides: list[str], said: str) -> None:
    assert said in refusal(tmp_path, "", *overrides)


def test_emulated_workers_may_span_gpus_and_elasticity_may_be_on(tmp_path: Path) -> None:
    elastic = ["elastic.inter=true", "elastic.borrow=gated", "elastic.trace=t.csv"]
    for pd in ("adaptive", "3P5D"):
        assert load(write(tmp_path, ""), [*EMULATED, f"elastic.pd={pd}"]).elastic.pd == pd
    config = load(write(tmp_path, ""), [*EMULATED, "rollout.gpus_per_worker=2", *elastic])
    assert (config.rollout.gpus_per_worker, config.elastic.borrow) == (2, "gated")


def test_an_own_environment_is_accepted(tmp_path: Path) -> None:
    assert load(write(tmp_path, ""), ["environment.name=my.games:Chess"]).environment.name == "my.games:Chess"


def test_warm_start_off_needs_no_fitting_schedule(tmp_path: Path) -> None:
    assert load(write(tmp_path, ""), ["warm_start.num_steps=0"]).warm_start.num_steps == 0


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.toml")
    assert "is not valid TOML" in refusal(tmp_path, "[run\n")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin.toml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_is_right(path: Path) -> None:
    # SGLang need not be installed here: its job's other settings are checked without it.
    config = load(path, ["rollout.engine=torch"] if "sglang" in path.name else [])
    assert config.run.num_steps > 0


def test_the_quickstart_is_shipped() -> None:
    assert (CONFIGS / "quickstart.toml").is_file()


NUMBERS = [
    (section, key)
    for section, kinds in KEYS.items()
    for key, kind in kinds.items()
    if kind in (int, float, float | None, tuple[float, float])
]
SAID = (
    "less than|more than|finite|63 bits|integer|teaches nothing|leaves no room|does not hold|multiple|enough"
)
EXTREMES = ("1e-300", "1e300", "-1", "0", "1000000000000", "nan", "inf", "-inf", str(10**30))


def test_every_number_is_bounded_both_ways() -> None:
    assert len(NUMBERS) > 80
    for section, key in NUMBERS:
        for value in (-(1 << 62), 1 << 62) if KEYS[section][key] is int else (-1e300, 1e300):
            values = [value, value] if key == "betas" else value
            if (section, key, value) == ("run", "seed", 1 << 62):
                continue  # any 63 bits are a seed
            (line,) = problems({section: {key: values}})[:1]
            assert line.startswith(f"{section}.{key}: ")
            assert "is less than" in line or "is more than" in line or "must be less than" in line


@pytest.mark.parametrize(("section", "key"), NUMBERS, ids=".".join)
def test_an_extreme_number_is_taken_or_refused_with_key_and_bound(
    section: str, key: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "")
    for extreme in EXTREMES:
        text = f"[{extreme}, {extreme}]" if key == "betas" else extreme
        try:
            config = load(path, [f"{section}.{key}={text}"])
        except ConfigError as error:
            (first, *_) = str(error).splitlines()
            assert f"{section}.{key}" in first
            assert re.search(SAID, first), first
        else:
            assert msgspec.json.decode(resolved_json(config), type=Config) == config


def test_what_is_wrong_alone_and_what_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "[run]\nnum_steps = 0\n[data]\nbatch_size = 20\n",
        "runtime.heartbeat_period_s=1e-300",
        "rollout.trajectory_deadline_s=1",
        "training.betas=[0.9, 1.5]",
    )
    lines = message.splitlines()
    assert len(lines) == 5
    assert "run.num_steps: 0 is less than 1" in lines[0]
    assert "runtime.heartbeat_period_s: 1e-300 is less than 0.01" in lines[1]
    assert "training.betas: 1.5 must be less than 1" in lines[2]
    assert lines[3].startswith("data.batch_size: 20 is not a multiple")
    assert lines[4].startswith("rollout.trajectory_deadline_s: 1.0 is less than")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["runtime.progress_timeout_s=0.6"], "runtime.progress_timeout_s: 0.6 is less than two heartbeats"),
        (["runtime.start_timeout_s=0.9"], "runtime.start_timeout_s: 0.9 is less than two heartbeats"),
        (["runtime.lease_s=0.9"], "runtime.lease_s: 0.9 is less than two heartbeats"),
        (["rollout.frame_period_s=40"], "runtime.progress_timeout_s: 60.0 is less than two frames"),
        (["rollout.frame_period_s=20", "rollout.turn_deadline_s=10"], "nothing of a turn would be heard"),
        (["weights.bucket_deadline_s=61"], "is more than runtime.update_timeout_s = 60.0"),
    ],
)
def test_times_that_contradict_each_other_are_refused(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    assert said in refusal(tmp_path, "", *overrides)


def test_a_config_made_in_code_is_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size: 0 is less than 1"):
        validate(Config(data=DataConfig(batch_size=0)))
    with pytest.raises(ConfigError, match=r"is not a multiple of data\.group_size"):
        validate(Config(data=DataConfig(batch_size=20)))
    validate(Config())
