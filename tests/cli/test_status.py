"""``pearl status`` against a hub that answers as the coordinator does, one that is silent, and none."""

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from pearl.cli import asking, main
from pearl.runtime import registry
from pearl.runtime.clock import MonotonicClock
from pearl.runtime.hub import Asked, Hub
from pearl.state.messages.control import ControlMessage, StatusReply

ANSWER = {
    "step": 3,
    "weight_version": 2,
    "workers": [
        {
            "slot": 0,
            "incarnation": 2,
            "role": "colocated",
            "zone": "dedicated",
            "activity": "active",
            "gpus": ["host/0"],
            "weight_version": None,
            "host": "host",
            "pid": 4711,
        }
    ],
}


class Coordinator:
    """A hub on its own loop and thread, registered as a live run."""

    def __init__(self, run_dir: Path, answers: bool) -> None:
        self._run_dir = run_dir
        self._answers = answers
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        hub = Hub(
            "tcp://127.0.0.1:0",
            run_id="r",
            messages=ControlMessage,
            queue_messages=64,
            max_frame_bytes=1 << 20,
            clock=MonotonicClock(),
        )
        async with hub:
            run = registry.register(self._run_dir, hub.address, "r", os.getpid())
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(self._answer(hub), name="answer")
                self._ready.set()
                await self._stop.wait()
                answering.cancel()
            registry.unregister(run)

    async def _answer(self, hub: Hub) -> None:
        while True:
            inbound = await hub.receive()
            if isinstance(inbound, Asked) and self._answers:
                inbound.reply(StatusReply(json.dumps(ANSWER).encode()))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def test_json_is_the_answer_as_it_came(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Coordinator(run_dir, answers=True):
        assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


def test_table_of_a_named_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Coordinator(run_dir, answers=True):
        assert main(["status", "--run-dir", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert "step 3, weight version 2" in printed
    for cell in ("colocated", "active", "host/0", "4711"):
        assert cell in printed


def test_a_silent_coordinator_is_given_up(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking.ask_status, "__defaults__", (0.3,))
    with Coordinator(run_dir, answers=False):
        assert main(["status"]) == 1
    assert "no answer from tcp://127.0.0.1:" in capsys.readouterr().err


def test_no_live_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "no live run on this host" in capsys.readouterr().err
    assert main(["status", "--run-dir", str(run_dir)]) == 1
    assert f"no live run in {run_dir}" in capsys.readouterr().err
    assert main(["status", "--run-dir", "absent"]) == 2
