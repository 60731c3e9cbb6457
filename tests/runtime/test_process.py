"""Groups of processes start, are watched and end with all their descendants."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
import psutil
import pytest
from member_watch import LIMIT_S, Members, watch_members

from pearl.runtime import mmap_counter, pidfd, process_group, process_markers
from pearl.runtime.process_group import ProcessGroup
from pearl.types.messages.control import StartGroup


@pytest.fixture
async def watch() -> AsyncIterator[Members]:
    async with watch_members() as watched:
        yield watched


@pytest.fixture
async def run_id() -> AsyncIterator[str]:
    """A run of this test alone; whatever a failed test leaves ends with it."""
    unique = f"test-{uuid4().hex}"
    yield unique
    await process_markers.kill_run(unique)


async def started(spec: StartGroup, run_id: str) -> ProcessGroup:
    group = ProcessGroup(spec, run_id)
    await group.start()
    return group


async def ending(group: ProcessGroup) -> process_group.Exit:
    async with asyncio.timeout(LIMIT_S):
        return await group.wait()


async def test_a_process_sees_its_markers_and_settings(watch: Members, run_id: str, tmp_path: Path) -> None:
    group = await started(watch.spec("sleep", tmp_path, environment={"CUDA_VISIBLE_DEVICES": "3"}), run_id)
    await watch.up("sleep")
    assert watch.reports["sleep"]["environment"] == {
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "PEARL_RUN_ID": run_id,
        "PEARL_GROUP": "group.0.1",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert set(process_markers.find_marked(run_id)) == {group.pid, watch.pids["sleep"]}
    assert await group.stop(LIMIT_S) == 0
    assert (await ending(group)).reason == "stopped as asked"


async def test_an_exit_is_told_with_code_reason_and_the_end_of_the_log(
    watch: Members, run_id: str, tmp_path: Path
) -> None:
    group = await started(watch.spec("exit", tmp_path), run_id)
    with mmap_counter.MmapCounter(tmp_path / "group.0.1" / "counter") as tokens:
        tokens.add(12)
    exit_ = await ending(group)
    assert (exit_.code, exit_.reason, exit_.counter) == (3, "exited with code 3", 12)
    assert exit_.log_tail == "[rank0.log]\nabout to fail"
    assert await group.stop(1.0) == 0
    assert await group.wait() == exit_


@pytest.mark.scenario("PL-02")
async def test_a_daemon_and_a_child_without_markers_end_with_their_group(
    watch: Members, run_id: str, tmp_path: Path
) -> None:
    daemon = await started(watch.spec("daemon", tmp_path), run_id)
    cleared = await started(watch.spec("cleared", tmp_path, group="group.1.1"), run_id)
    await watch.up("daemon", "cleared", "child")
    await daemon.stop(LIMIT_S)
    await cleared.stop(0)
    await watch.ended("daemon", "cleared", "child")
    for group in (daemon, cleared):
        await ending(group)


@pytest.mark.scenario("PL-01")
async def test_kill_9_of_the_launcher_leaves_nobody(watch: Members, run_id: str, tmp_path: Path) -> None:
    group = await started(watch.spec("daemon", tmp_path), run_id)
    await watch.up("daemon")
    assert group.pid is not None
    os.kill(group.pid, signal.SIGKILL)
    assert (await ending(group)).reason == "killed by signal 9 (Killed)"
    await watch.ended("daemon")
    assert process_markers.find_marked(run_id) == []


@pytest.mark.parametrize("end", ["stop", "kill the member", "kill the launcher"])
@pytest.mark.scenario("PL-02")
async def test_who_escaped_with_another_environment_and_session_ends_with_its_group(
    watch: Members, run_id: str, tmp_path: Path, end: str
) -> None:
    module = {"module": "lone_launcher"}
    spec = msgspec.json.encode(watch.spec("escape", tmp_path)).decode()
    launcher = await started(
        watch.spec("", tmp_path, group="launcher", arguments=(spec, run_id), **module), run_id
    )
    await watch.up("escape", "escaped")
    assert watch.pids["escaped"] not in process_markers.find_marked(run_id)
    match end:
        case "stop":
            await launcher.stop(0)
        case "kill the member":
            os.kill(watch.pids["escape"], signal.SIGKILL)
        case "kill the launcher":  # as kill -9 of an agent, of which the subreaper is a child
            ancestors = psutil.Process(watch.pids["escape"]).parents()
            ancestors[1].kill()
    await watch.ended("escape", "escaped")
    await launcher.stop(0)
    await ending(launcher)


async def test_an_orphan_ends_with_its_group_and_touches_no_other(
    watch: Members, run_id: str, tmp_path: Path
) -> None:
    """The subreaper of a group is killed, and what descent alone tells of comes to whoever started the group."""
    spec = msgspec.json.encode(watch.spec("escape", tmp_path)).decode()
    other = msgspec.json.encode(watch.spec("daemon", tmp_path, group="group.1.1")).decode()
    launcher = await started(
        watch.spec("", tmp_path, group="launcher", module="lone_launcher", arguments=(spec, run_id, other)),
        run_id,
    )
    await watch.up("escape", "escaped", "daemon")
    psutil.Process(watch.pids["escape"]).parents()[0].kill()
    await watch.ended("escape", "escaped")
    assert "daemon" in watch.living()
    await launcher.stop(0)
    await watch.ended("daemon")
    await ending(launcher)


async def test_who_does_not_end_on_sigkill_is_named(
    watch: Members, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await started(watch.spec("sleep", tmp_path), run_id)
    await watch.up("sleep")
    with monkeypatch.context() as patch:
        patch.setattr(
            process_markers, "send", lambda fds, number: None
        )  # as to a process that is stuck in the kernel
        killed = await process_markers.kill_run(run_id, limit_s=0.01)
    assert len(killed.survivors) == 2
    assert any(f"pid {watch.pids['sleep']} (python" in text for text in killed.survivors), killed
    await group.stop(0)
    await ending(group)


async def test_who_ignores_sigterm_is_killed_after_the_grace(
    watch: Members, run_id: str, tmp_path: Path
) -> None:
    group = await started(watch.spec("stubborn", tmp_path), run_id)
    await watch.up("stubborn")
    assert await group.stop(0.05) == 1
    assert (await ending(group)).code == -signal.SIGKILL


@pytest.mark.parametrize(("grace_s", "code"), [(LIMIT_S, 0), (0.0, -signal.SIGKILL)])
async def test_a_stopped_process_ends_too(
    watch: Members, run_id: str, tmp_path: Path, grace_s: float, code: int
) -> None:
    group = await started(watch.spec("polite", tmp_path), run_id)
    await watch.up("polite")
    os.kill(watch.pids["polite"], signal.SIGSTOP)
    await group.stop(grace_s)
    assert (await ending(group)).code == code


@pytest.mark.scenario("PL-02")
async def test_kill_9_of_whoever_started_a_group_ends_it(watch: Members, run_id: str, tmp_path: Path) -> None:
    spec = msgspec.json.encode(watch.spec("stubborn", tmp_path)).decode()
    module = {"module": "lone_launcher", "arguments": (spec, run_id)}
    launcher = await started(watch.spec("", tmp_path, group="launcher", **module), run_id)
    await watch.up("stubborn")
    assert launcher.pid is not None
    os.kill(launcher.pid, signal.SIGKILL)
    await watch.ended("stubborn")
    await ending(launcher)


@pytest.mark.scenario("PL-02")
async def test_who_starts_after_its_parent_died_ends_at_once(run_id: str) -> None:
    stale = os.environ | {"PEARL_PARENT": "1"}  # adopted, as the check sees it
    code = "from pearl.runtime.parent_death import watch_parent; watch_parent(); print('alive')"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=stale, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    assert output == b""
    assert child.returncode == -signal.SIGKILL


async def test_kill_run_never_touches_another_run(watch: Members, run_id: str, tmp_path: Path) -> None:
    other_id = f"{run_id}-other"
    mine = await started(watch.spec("stubborn", tmp_path), run_id)
    other = await started(watch.spec("sleep", tmp_path, group="group.1.1"), other_id)
    await watch.up("stubborn", "sleep")
    assert (await process_markers.kill_run(run_id)).num_killed == 2  # with its subreaper
    await watch.ended("stubborn")
    assert watch.living() == {"sleep"}
    assert await process_markers.kill_run(run_id) == (0, ())
    await other.stop(0)
    for group in (mine, other):
        await ending(group)


async def test_groups_with_unusable_names_or_sizes_are_refused(watch: Members, tmp_path: Path) -> None:
    for name in ("", "..", "a/b", ".a", "a b"):
        with pytest.raises(ValueError, match="group name"):
            ProcessGroup(watch.spec("sleep", tmp_path, group=name), "run")
    with pytest.raises(ValueError, match="num_processes = -1"):
        ProcessGroup(watch.spec("sleep", tmp_path, num_processes=-1), "run")


def test_arguments_of_ranks_are_no_templates(watch: Members, tmp_path: Path) -> None:
    from torch.distributed.elastic.utils.api import macros  # imports torch: seconds, for this test only

    names = ("/runs/$$a ${local_rank}", "$local_rank", "%d{x}")
    spec = watch.spec("rank", tmp_path, num_processes=2, arguments=names)
    words = process_group.command_line(spec, Path("/runs/$$a"))
    ranks = macros.substitute(words[words.index("--log-directory") :], "7")
    assert ranks == ["--log-directory", "/runs/$$a", spec.module, *names]


def _pid_of(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


@pytest.mark.timeout(180)  # torchrun imports torch: seconds on a busy machine
@pytest.mark.scenario("NW-01")
async def test_two_torchrun_groups_start_at_once_and_end_alone(
    watch: Members, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watch_members() as others:
        groups = [
            await started(where.spec("rank", tmp_path, group=f"group.{slot}.1", num_processes=2), run_id)
            for slot, where in enumerate((watch, others))
        ]
        for where in (watch, others):
            await where.up("rank0", "rank1", limit_s=120)
        reports = [*watch.reports.values(), *others.reports.values()]
        assert all(report["agent_store"] for report in reports)
        assert len({report["port"] for report in reports}) == 2
        launcher = groups[0].pid
        assert launcher is not None
        os.kill(launcher, signal.SIGKILL)
        await watch.ended("rank0", "rank1")
        assert others.living() == {"rank0", "rank1"}
        awaited: list[int] = []

        async def wait_exited(fds: Sequence[int], limit_s: float) -> bool:
            awaited.extend(_pid_of(fd) for fd in fds)
            return await pidfd.wait_exited(fds, limit_s)

        monkeypatch.setattr(process_group, "wait_exited", wait_exited)
        (torchrun,) = psutil.Process(groups[1].pid).children()
        await groups[1].stop(LIMIT_S)
        assert torchrun.pid not in awaited, "a launcher has nothing to finish"
        await others.ended("rank0", "rank1")
        for group in groups:
            await ending(group)
    assert {path.name for path in (tmp_path / "group.0.1").glob("*.log")} == {
        "launcher.log",
        "rank0.log",
        "rank1.log",
    }
