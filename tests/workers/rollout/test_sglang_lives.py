"""Lives of SGLang servers: they end with their worker, and are started anew for a role they cannot switch to."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import sglang_support
from engine_contract import Subject
from engine_support import MODEL, VOCABULARY, greedy_reference, ids, image, reference, request

from pearl.runtime.pidfd import wait_exited
from pearl.runtime.process_markers import open_pidfds, with_descendants
from pearl.workers.rollout.sglang.engine import SglangEngine
from pearl.workers.rollout.sglang.health import EngineDiedError
from pearl.workers.rollout.sglang.model_files import write_model
from pearl.workers.rollout.sglang.pair_rendezvous import PairRendezvous
from pearl.workers.rollout.sglang.server import Server

pytestmark = [
    pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not()),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]
GONE_S = 15.0


@pytest.mark.scenario("PL-02")
async def test_nothing_of_sglang_outlives_kill_9_of_its_worker(tmp_path: Path) -> None:
    script = Path(__file__).with_name("sglang_worker.py")
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        assert worker.stdout is not None
        pid = int(await worker.stdout.readline())
        with open_pidfds(with_descendants([pid])) as fds:
            assert len(fds) >= 3, "server, scheduler and detokenizer"
            worker.kill()
            assert await wait_exited(fds, GONE_S)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


async def test_a_role_out_of_reach_of_a_switch_restarts_sglang_alone_and_its_death_ends_the_engine(
    tmp_path: Path,
) -> None:
    with pytest.raises(ExceptionGroup) as failure:
        await _switch_and_die(tmp_path)
    assert failure.value.subgroup(EngineDiedError) is not None


async def _switch_and_die(directory: Path) -> None:
    settings = sglang_support.settings_in(directory)
    server = Server(settings)
    point = PairRendezvous("127.0.0.1", "127.0.0.1", "rollout.0.1")
    async with asyncio.TaskGroup() as group:
        engine = SglangEngine(
            settings,
            server,
            lambda: write_model(MODEL, VOCABULARY, settings.model_directory),
            group,
            start_limit_s=sglang_support.START_LIMIT_S,
            point=point,
            role="decode",
        )
        try:
            await engine.start()
            await _serve_as_colocated(Subject(engine, image), str(point.address), point)
            subject = Subject(engine, image)
            await subject.generate(request(2, ids(1, 20), 1500))
            await subject.produced(1, 2)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            answer = (await subject.finished(2))[2]
            assert (answer.finish, len(answer.ids) > 0) == ("abort", True)
            await asyncio.sleep(GONE_S)  # the engine's own task ends this
        finally:
            await engine.shutdown()


async def _serve_as_colocated(subject: Subject, address: str, point: PairRendezvous) -> None:
    checksum = await subject.take(1)
    await subject.engine.set_role("colocated")
    assert (subject.engine.role, str(point.address)) == ("colocated", address)
    assert await subject.engine.checksum() == checksum, "it has the weights it had"
    await subject.generate(request(1, ids(1, 20), 12, temperature=0.0))
    assert (await subject.finished(1))[1].ids == greedy_reference(reference(1), ids(1, 20), 12)
