"""What the SGLang engine makes of what it is told, without SGLang."""

import asyncio
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import MODEL, VOCABULARY, image, request

from pearl.types.config import Config, ModelConfig, RolloutConfig
from pearl.types.splitmix import splitmix64
from pearl.types.trajectory import VersionRun
from pearl.types.weights import BucketSpec, Version
from pearl.workers.rollout.request_checks import role_mismatch
from pearl.workers.rollout.sglang.attempt import Attempt, MalformedError, Piece, finish_of, read_event
from pearl.workers.rollout.sglang.client import complaint
from pearl.workers.rollout.sglang.http_exchange import EventSplitter, HttpError, HttpExchange
from pearl.workers.rollout.sglang.iteration_meter import IterationMeter
from pearl.workers.rollout.sglang.loading import Loading
from pearl.workers.rollout.sglang.model_files import Model, write_model
from pearl.workers.rollout.sglang.requests import invalid_reason
from pearl.workers.rollout.sglang.settings import (
    CPU_PATH,
    SERVER_PATH,
    arguments,
    environment,
    settings_of,
)
from pearl.workers.rollout.sglang.weights import StagedWeights, answers, complaints
from pearl.workers.rollout.torch_engine.sampler import key_uniform, sample
from pearl.workers.rollout.update_image import place_bucket

OLD, NEW = Version(0, 1), Version(0, 2)


def event(
    tokens: list[int],
    total: int,
    *,
    finish: str | None = None,
    spans: list[tuple[str, int, int]] | None = None,
    **meta: object,
) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "completion_tokens": total,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "finish_reason": None if finish is None else {"type": finish},
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans or []],
            **meta,
        },
    }


def attempt(version: Version = OLD) -> Attempt:
    found = Attempt(request(1, [1, 2, 3], 50), lambda delta: None)
    found.begin("r", version)
    return found


def test_new_tokens_are_told_apart_from_all_tokens() -> None:
    assert read_event(event([5, 6], 2), 0).ids == [5, 6]
    assert read_event(event([7], 3), 2).ids == [7]
    assert read_event(event([5, 6, 7], 3), 2).ids == [7], "an abort answers with all of them"
    assert read_event(event([], 2, finish="abort"), 2).ids == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (event([5, 6], 4), "2 ids after 1 of 4"),
        (event([5], 2, output_token_logprobs=[]), "0 log-probs after 1 of 2"),
        (event([5], 2, output_token_logprobs=[[-0.5, 9, None]]), "other tokens"),
        (event([5], 2, output_token_logprobs=[[None, 5, None]]), "that are none"),
        (event([5], 2, output_token_logprobs=[[0.7, 5, None]]), "that are none"),
        ({"output_ids": [5]}, "without meta_info"),
    ],
)
def test_p5_what_does_not_add_up_is_not_kept(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedError, match=said):
        read_event(wrong, 1)


def test_prefilled_tokens_are_told_once() -> None:
    assert read_event(event([5], 1), 0).prefilled_tokens == 6
    assert read_event(event([5], 2), 1, asks_prefill=0).prefilled_tokens == 0


def test_labels_say_where_in_a_piece_the_weights_changed() -> None:
    subject = attempt()
    subject.take(subject.read(event([5, 6], 2, spans=[("0:1", 0, 2)])))
    subject.update(NEW)
    runs = subject.take(subject.read(event([7, 8, 9], 5, spans=[("0:1", 0, 3), ("0:2", 3, 5)])))
    assert runs == [VersionRun(OLD, 1, OLD), VersionRun(NEW, 2, OLD)]
    assert subject.generated == [5, 6, 7, 8, 9]


def test_labels_that_call_told_tokens_new_change_nothing() -> None:
    """SGLang relabels all of a request after some kinds of pauses."""
    subject = attempt()
    first = subject.take(subject.read(event([5, 6], 2, spans=[("0:1", 0, 2)])))
    subject.update(NEW)
    second = subject.take(subject.read(event([7], 3, spans=[("0:2", 0, 3)])))
    assert (first, second) == ([VersionRun(OLD, 2, OLD)], [VersionRun(NEW, 1, OLD)])


def test_a_label_of_weights_that_it_never_ran_under_is_refused() -> None:
    subject = attempt()
    with pytest.raises(MalformedError, match="0:7"):
        subject.take(subject.read(event([5], 1, spans=[("0:7", 0, 1)])))


def test_tokens_without_labels_are_of_the_version_it_runs_under() -> None:
    subject = attempt(NEW)
    assert subject.take(subject.read(event([5], 1))) == [VersionRun(NEW, 1, NEW)]


def test_an_attempt_that_was_taken_out_goes_on_with_what_it_has() -> None:
    subject = attempt()
    subject.take(subject.read(event([5, 6], 2)))
    subject.begin("s", NEW)
    assert (subject.context.tolist(), subject.num_left) == ([1, 2, 3, 5, 6], 48)
    assert subject.take(subject.read(event([7], 1))) == [VersionRun(NEW, 1, NEW)]


def piece(kind: str | None, message: str = "") -> Piece:
    said = event([], 0, finish=kind)
    if kind is not None:
        said["meta_info"]["finish_reason"]["message"] = message
    return read_event(said, 0)


def test_how_it_ended() -> None:
    assert finish_of(piece(None), is_aborted=False) is None
    assert finish_of(piece("length"), is_aborted=True) == "length"
    assert finish_of(piece("abort", "Aborted"), is_aborted=True) == "abort"
    assert finish_of(piece("abort", "out of memory"), is_aborted=False) == "error"


def test_kv_that_did_not_come_is_no_error_of_the_worker_that_waited_for_it() -> None:
    subject = attempt()
    late = piece("abort", "timed out after 10 s in KVPoll.WaitingForInput")
    assert subject.finish(late) == "error"
    subject.stage = "decode"
    assert subject.finish(late) == "abort"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_answer_in_pieces_of_any_size(size: int) -> None:
    body = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[i : i + 5]), body[i : i + 5]) for i in range(0, len(body), 5)
    )
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    parser, events, found = exchange(), EventSplitter(), []
    for start in range(0, len(data), size):
        found += events.feed(parser.feed(data[start : start + size]))
    assert (parser.status, parser.is_done, found) == (200, True, [{"a": 1}, {"b": 2}])


def exchange() -> HttpExchange:
    return HttpExchange("GET", "/health", None, host="127.0.0.1:1")


def test_answers_that_are_cut_off_or_malformed_are_refused() -> None:
    answer = exchange()
    assert answer.feed(b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\nnot ") == b"not "
    assert answer.status == 400
    with pytest.raises(HttpError, match="received 4 bytes, expected 9"):
        answer.feed(b"")
    with pytest.raises(HttpError, match="closed the connection before"):
        exchange().feed(b"")
    with pytest.raises(HttpError, match="not a valid HTTP answer"):
        exchange().feed(b"SSH-2.0\r\n\r\n")
    with pytest.raises(HttpError, match="not JSON"):
        EventSplitter().feed(b"data: {\n\n")
    sent = HttpExchange("POST", "/generate", {"a": [1]}, host="127.0.0.1:1").request
    assert sent.startswith(b"POST /generate HTTP/1.1\r\n")
    assert sent.endswith(b'{"a": [1]}')
    assert complaint({"error": {"message": "too\nlong"}}) == "too long"


def test_passes_are_seen_in_what_streams() -> None:
    meter = IterationMeter()
    meter.begin(0.0)
    for now in (1.0, 1.5):
        meter.note(1, now, 1, 10 if now == 1.0 else 0, 11)
        meter.note(2, now, 1, 20 if now == 1.0 else 0, 21)
    meter.idle()
    first, second = meter.take()
    assert (first.seconds, first.num_decoding, first.prefill_tokens, first.context_tokens) == (1.0, 2, 30, 32)
    assert (second.seconds, second.num_decoding, second.prefill_tokens) == (0.5, 2, 0)
    assert meter.take() == []


def test_tokens_that_come_several_at_once_are_as_many_passes() -> None:
    meter = IterationMeter()
    meter.begin(0.0)
    meter.note(1, 4.0, 4, 8, 20)
    meter.idle()
    assert [(stat.seconds, stat.prefill_tokens) for stat in meter.take()] == [(1.0, 8), *[(1.0, 0)] * 3]


def settings(uses_gpu: bool, **rollout: Any) -> Any:
    config = Config(model=ModelConfig(device="cpu"), rollout=RolloutConfig(engine="sglang", **rollout))
    return settings_of(
        config, python="/p", model_directory=Path("/m"), uses_gpu=uses_gpu, log_path=Path("/l")
    )


def test_stand_ins_are_on_the_path_only_where_there_is_no_gpu() -> None:
    base = {
        "PYTHONPATH": "/elsewhere",
        "RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PEARL_GROUP": "rollout.0.1",
    }
    on_cpu, on_gpu = (environment(settings(uses_gpu), "h", "/f", base) for uses_gpu in (False, True))
    assert on_cpu["PYTHONPATH"] == f"{SERVER_PATH}:{CPU_PATH}"
    assert on_gpu["PYTHONPATH"] == str(SERVER_PATH)
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu
    assert (on_cpu["TMPDIR"], on_cpu["PEARL_SGLANG_FILES"]) == ("/f", "/f")
    assert on_cpu["TORCHINDUCTOR_CACHE_DIR"] != "/f", "what was compiled is there for the next server"
    assert on_cpu["PEARL_GROUP"] == "rollout.0.1", "markers by which what is left of a group is found"
    assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE"} & on_cpu.keys()


def test_halves_and_colocated_servers_are_told_what_they_are() -> None:
    colocated = arguments(settings(False), "colocated", 1, 2)
    stage = arguments(settings(True), "decode", 1, 2)
    assert not any("disaggregation" in word for word in colocated)
    assert stage[stage.index("--disaggregation-mode") + 1] == "decode"
    assert stage[stage.index("--disaggregation-transfer-backend") + 1] == "mooncake"
    assert "--disaggregation-decode-enable-radix-cache" in stage
    cpu_half = arguments(settings(False), "prefill", 1, 2)
    assert cpu_half[cpu_half.index("--disaggregation-transfer-backend") + 1] == "mooncake_tcp"


def test_requests_that_cannot_be_served_are_named() -> None:
    limits = settings(False, max_context_tokens=100, kv_capacity_tokens=1000)
    assert "more than rollout.max_context_tokens = 100" in invalid_reason(
        request(1, [1] * 90, 20), 32, limits
    )
    assert "vocabulary of 32" in invalid_reason(request(1, [32], 1), 32, limits)
    assert invalid_reason(request(1, [31], 1), 32, limits) == ""
    assert "stages of a pair only" in role_mismatch(request(1, [1], 1), "decode")
    assert role_mismatch(request(1, [1], 1), "colocated") == ""


def write_parts(directory: Path) -> tuple[Model, StagedWeights]:
    model = write_model(MODEL, VOCABULARY, directory)
    return model, StagedWeights(model, image(1).version, image(1).tensors)


def test_the_image_that_is_staged_is_the_one_that_was_published(tmp_path: Path) -> None:
    model, staged = write_parts(tmp_path)
    for bucket, data in reversed(image(1).buckets(4096)):
        staged.add(bucket, data)
    staged.check_whole()
    assert staged.checksum() == image(1).checksum
    tied = [
        piece.tensor
        for piece in model.pieces
        if piece.name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    assert tied == ["lm_head.weight"] * 2
    staged.close()


def test_an_update_of_the_same_size_is_staged_in_the_same_memory(tmp_path: Path) -> None:
    loading = Loading(settings(False))
    model = write_model(MODEL, VOCABULARY, tmp_path)
    sums, files = [], []
    for seed in (1, 2):
        loading.stage(model, image(seed).version, image(seed).tensors)
        assert loading.staged is not None
        for bucket, data in image(seed).buckets(4096):
            loading.staged.add(bucket, data)
        sums.append(loading.staged.checksum())
        files.append(os.fstat(loading.staged.memory.fd).st_ino)
    assert sums == [image(1).checksum, image(2).checksum]
    assert files[0] == files[1]
    with pytest.raises(ValueError, match="lacks tensor"):
        loading.stage(model, image(1).version, image(1).tensors[1:])
    assert loading.staged is not None
    assert loading.staged.checksum() == image(2).checksum, "what was whole is whole"
    loading.drop()


@pytest.mark.parametrize("ends", ["staged", "cancelled"])
async def test_the_event_loop_goes_on_while_a_bucket_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The copy ends only when the loop says so: on the loop it never would."""
    begun, may_end, copied = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        assert may_end.wait(10)
        copied.set()

    loading = Loading(settings(False))
    loading.stage(write_model(MODEL, VOCABULARY, tmp_path), image(1).version, image(1).tensors)
    monkeypatch.setattr(StagedWeights, "add", slow)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        adding = tasks.create_task(loading.add(*image(1).buckets(4096)[0]))
        assert await asyncio.to_thread(begun.wait, 10)
        if ends == "cancelled":
            adding.cancel()
            await asyncio.sleep(0)
            assert not adding.done(), "the thread still reads the bucket"
        may_end.set()
    assert copied.is_set()
    assert adding.cancelled() == (ends == "cancelled")
    loading.drop()


def test_other_threads_run_while_a_bucket_is_copied() -> None:
    """Without forced switches, another thread runs only while this one has let go of the GIL."""
    data, target = memoryview(bytes(8 << 20)), memoryview(bytearray(8 << 20))
    passes, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            passes[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    counter = threading.Thread(target=count)
    counter.start()
    sys.setswitchinterval(100.0)
    try:
        seen = []
        for _ in range(100):
            before = passes[0]
            place_bucket(target, BucketSpec(0, len(data), ""), data)
            seen.append(passes[0] - before)
            if seen[-1]:
                break
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        counter.join()
    assert seen[-1] > 0


def test_missing_bytes_are_named_before_sglang_hears_of_it(tmp_path: Path) -> None:
    _, staged = write_parts(tmp_path)
    staged.add(*image(1).buckets(4096)[0])
    with pytest.raises(ValueError, match="without all bytes of tensor"):
        staged.check_whole()
    with pytest.raises(ValueError, match="has 3 bytes, not 4"):
        staged.add(BucketSpec(0, 4, ""), memoryview(b"abc"))
    staged.close()


def test_the_model_directory_says_nothing_of_end_tokens(tmp_path: Path) -> None:
    write_parts(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["architectures"] == ["Qwen3ForCausalLM"]
    assert "eos_token_id" not in content


GOOD: dict[str, list[str]] = {"wrong": [], "unproven": [], "unused": []}


def test_ranks_that_say_what_is_wrong_or_nothing(tmp_path: Path) -> None:
    answer = tmp_path / "loaded"
    (tmp_path / "loaded.0").write_text(json.dumps(GOOD))
    (tmp_path / "loaded.1").write_text(json.dumps(GOOD | {"wrong": ["a"]}))
    assert "rank 1 of SGLang serves other values than it was given in a" in complaints(answers(answer, 2))
    with pytest.raises(ValueError, match="rank 0 of SGLang did not say"):
        answers(answer, 1)
    assert complaints([{"error": "ValueError: no"}]) == "rank 0 of SGLang could not load it: ValueError: no"


def test_nothing_is_proven_that_some_rank_could_not_prove() -> None:
    assert complaints([GOOD, GOOD]) == ""
    unproven = complaints([GOOD, GOOD | {"unproven": ["experts.w13_weight"]}])
    assert unproven.startswith("rank 1")
    assert unproven.endswith("experts.w13_weight")
    many = [f"layer.{index}" for index in range(9)]
    assert complaints([GOOD | {"wrong": many}]).endswith("layer.4 and 4 more")


def test_a_tensor_may_be_served_by_any_of_the_ranks_but_not_by_none() -> None:
    ours, theirs = GOOD | {"unused": ["experts.0", "gone"]}, GOOD | {"unused": ["experts.1", "gone"]}
    assert complaints([ours, theirs]) == "no rank of SGLang serves gone of the update"
    assert complaints([GOOD | {"unused": ["experts.0"]}, GOOD | {"unused": ["experts.1"]}]) == ""


def on_server() -> ModuleType:
    """What runs inside SGLang's processes."""
    if str(SERVER_PATH) not in sys.path:
        sys.path.append(str(SERVER_PATH))
    return importlib.import_module("pearl_on_server")


def test_draws_inside_sglang_are_those_of_the_torch_engine() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    seeds, positions = [0, 1, 2**63 + 5, 2**64 - 1, 77, 12345], np.array([1, 2, 3, 400, 5, 60000])
    keys = [splitmix64(seed) for seed in seeds]
    signed = torch.tensor([key - (1 << 64) if key >= 1 << 63 else key for key in keys])
    uniforms = key_uniform(np.array(keys, np.uint64), positions)
    expected = sample(logits, np.ones(6), uniforms).ids
    probs = logits.double().softmax(-1)
    assert on_server().draw(probs, signed, torch.from_numpy(positions)).tolist() == expected
