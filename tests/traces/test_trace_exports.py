"""Traces as people have them: logs of availability, Slurm's accounting, Kubernetes' events."""

import json
from pathlib import Path
from typing import Any

import pytest

from pearl.traces import Trace, TraceError, counts, load_trace
from pearl.traces.slurm import nodes_of

LOG = """\
2021-12-11, 11:11:30, 55
2021-12-11, 11:12:31, 55
2021-12-11, 11:13:30, 52
2021-12-11, 11:14:34, 52
2021-12-12, 00:00:04, 60
2021-12-12, 00:01:04, 0
"""
SLURM = """\
JobID|State|Start|End|NodeList|AllocTRES
12|PREEMPTED|2024-05-01T10:01:00|2024-05-01T10:05:00|gpu[01-02]|billing=8,cpu=64,node=2
12.batch|CANCELLED|2024-05-01T10:01:00|2024-05-01T10:05:00|gpu01|cpu=64,node=1
10|COMPLETED|2024-05-01T10:00:00|2024-05-01T10:02:00|gpu01,gpu07|node=2
13|PENDING|Unknown|Unknown|None assigned|
14|RUNNING|2024-05-01T10:05:00|Unknown|gpu03|node=1
15|CANCELLED by 1000|2024-05-01T10:05:30|2024-05-01T10:06:30|gpu03|node=1
"""


def load(tmp_path: Path, text: str, gpus_per_node: int = 1) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return load_trace(path, gpus_per_node=gpus_per_node)


def levels(tmp_path: Path, text: str, gpus_per_node: int = 1) -> list[tuple[float, int]]:
    return counts(load(tmp_path, text, gpus_per_node).events)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(TraceError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "trace"))
    return str(caught.value)


# logs of availability


def test_a_log_of_availability_is_read_with_its_irregular_times(tmp_path: Path) -> None:
    trace = load(tmp_path, LOG)
    assert counts(trace.events) == [(0.0, 55), (120.0, 52), (46114.0, 60), (46174.0, 0)]
    assert trace.format == "log of availability"
    (note,) = trace.notes
    assert note.startswith(
        "1 gap(s) of more than 610 s without a record, the longest of 45930 s from 184 s on"
    )


@pytest.mark.parametrize(
    "text",
    [
        "date, time, free\n2021-12-11, 11:11:30, 5\n2021-12-11, 11:12:30, 4\n",
        "timestamp,free\n2021-12-11T11:11:30Z,5\n2021-12-11T12:12:30+01:00,4\n",
        "2021-12-11 11:11:30,5\n2021-12-11 11:12:30,4\n",
        "# from a cloud\n2021-12-11,11:11:30.000,5\n\n2021-12-11,11:12:30.000,4\n",
    ],
)
def test_a_log_of_availability_is_read_however_it_is_written(text: str, tmp_path: Path) -> None:
    assert levels(tmp_path, text) == [(0.0, 5), (60.0, 4)]
    assert levels(tmp_path, text, gpus_per_node=8) == [(0.0, 40), (60.0, 32)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2021-12-11, 11:11:30, 55\n2021-12-11, 11:12:3x, 55\n", 'line 2: "2021-12-11, 11:12:3x" is no date'),
        ("2021-12-11, 11:11:30, 55\n2021-13-11, 11:12:30, 55\n", "line 2: "),
        (
            "2021-12-11, 11:11:30, 55\n2021-12-11, 11:11:29, 5\n",
            "line 2: seconds since the first line: -1 comes after 0",
        ),
        (
            "2021-12-11, 11:11:30, 55\n2021-12-11, 11:12:30\n",
            'line 2: "2021-12-11" is no date and time',
        ),
        ("2021-12-11, 11:11:30, many\n", 'line 1: the number of instances "many" is no finite number'),
        ("2021-12-11, 11:11:30, -1\n", "line 1: the number of instances -1 is negative"),
        ("2021-12-11, 11:11:30, 1.5\n", "line 1: the number of instances 1.5 is no count"),
        ("2021-12-11, 11:11:30, 1, 2\n", "line 1: "),
        ("2021-12-11T11:11:30Z, 1\n2021-12-11T11:12:30, 1\n", "line 2: some times have a zone"),
        ("2021-12-11, 11:11:30, 99999999\n", "line 1: the number of instances 99999999 is no count"),
    ],
)
def test_a_broken_log_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, text)


# Slurm


def test_the_nodes_of_slurms_jobs_come_and_go_with_them(tmp_path: Path) -> None:
    trace = load(tmp_path, SLURM)
    # gpu01 is held by two jobs for a minute and counts once; so does gpu03 later.
    assert counts(trace.events) == [(0.0, 2), (60.0, 3), (120.0, 2), (300.0, 1)]
    assert trace.notes == [
        "4 job(s): 1 CANCELLED, 1 COMPLETED, 1 PREEMPTED, 1 RUNNING",
        "2 row(s) left out: steps, and jobs that never started on a node",
        "1 job(s) have no end: their nodes stay to the trace's end",
    ]
    assert levels(tmp_path, SLURM, gpus_per_node=8)[1] == (60.0, 24)


def test_gpus_that_slurm_names_are_those_that_count(tmp_path: Path) -> None:
    text = (
        "JobID|Start|End|NodeList|AllocTRES\n"
        "1|2024-05-01T10:00:00|2024-05-01T10:10:00|a|cpu=4,gres/gpu=3,node=1\n"
        "2|2024-05-01T10:05:00|2024-05-01T10:10:00|a|gres/gpu=2,gres/gpu:h100=2\n"
    )
    assert levels(tmp_path, text, gpus_per_node=8) == [(0.0, 3), (300.0, 5), (600.0, 0)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-11,2],login", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu2", "login"]),
        ("r[1-2]n[1-2]-x", ["r1n1-x", "r1n2-x", "r2n1-x", "r2n2-x"]),
    ],
)
def test_node_lists_are_expanded(text: str, names: list[str]) -> None:
    assert nodes_of(text) == names


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1|2024-05-01T10:00:00|2024-05-01T09:00:00|a", "line 2: End 2024-05-01T09:00:00 comes before Start"),
        ("1|yesterday|Unknown|a", 'line 2: Start "yesterday" is not a time'),
        ("1|2024-05-01T10:00:00|soon|a", 'line 2: End "soon" is not a time'),
        ("1|2024-05-01T10:00:00|Unknown", "line 2: "),
        ("1|2024-05-01T10:00:00|Unknown|a[1-", 'line 2: NodeList "a[1-": its brackets do not fit'),
        ("1|2024-05-01T10:00:00|Unknown|a[]]", "its brackets do not fit"),
        ("1|2024-05-01T10:00:00|Unknown|a[x]", '"x" is no range of numbers'),
        ("1|2024-05-01T10:00:00|Unknown|a[2-1]", '"2-1" is no range'),
        ("1|2024-05-01T10:00:00|Unknown|a[1-999999999]", "no range of up to 65536 nodes"),
        ("1|2024-05-01T10:00:00|Unknown|a[1-999]b[1-999]", "more than 65536 nodes"),
        ("1|2024-05-01T10:00:00|Unknown|a,,b", "names no node"),
        ("1|Unknown|Unknown|None assigned", "no job in it has started"),
    ],
)
def test_broken_accounting_is_refused_with_its_line(row: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, f"JobID|Start|End|NodeList\n{row}\n")


# Kubernetes


def node_event(second: int, node: str, reason: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "Event",
        "involvedObject": {"kind": "Node", "name": node},
        "reason": reason,
        "lastTimestamp": f"2024-05-01T10:00:{second:02}Z",
        **changes,
    }


EVENTS = [
    node_event(30, "b", "NodeNotReady"),
    node_event(0, "a", "RegisteredNode"),
    node_event(1, "a", "NodeReady"),
    node_event(2, "a", "NodeHasSufficientMemory"),
    node_event(40, "b", "NodeReady", lastTimestamp=None, eventTime="2024-05-01T10:00:40.500000Z"),
    node_event(20, "pod", "Killing", involvedObject={"kind": "Pod", "name": "pod"}),
    node_event(50, "a", "RemovingNode"),
]


@pytest.mark.parametrize("indent", [None, 4])
def test_nodes_come_and_go_with_kubernetes_events(indent: int | None, tmp_path: Path) -> None:
    listed = json.dumps({"apiVersion": "v1", "items": EVENTS, "kind": "List"}, indent=indent)
    watched = "\n".join(json.dumps(event, indent=indent) for event in EVENTS)
    for text in (listed, watched):
        trace = load(tmp_path, text)
        # b is heard of first when it goes: it was there from the beginning.
        assert counts(trace.events) == [(0.0, 2), (30.0, 1), (40.5, 2), (50.0, 1)]
        assert trace.notes == [
            "2 node(s), 5 event(s) of them",
            "2 event(s) left out: of other objects, or of other reasons",
        ]
        assert levels(tmp_path, text, gpus_per_node=4)[0] == (0.0, 8)


def test_broken_events_are_refused_with_their_line(tmp_path: Path) -> None:
    def listed(*events: Any) -> str:
        return '{"items": [\n' + ",\n".join(json.dumps(event) for event in events) + "\n]}"

    good = EVENTS[0]
    assert 'line 3: the event\'s time "None" is not' in refusal(
        tmp_path, listed(good, node_event(1, "a", "NodeReady", lastTimestamp=None))
    )
    assert 'line 2: the event\'s time "2024-05-01T10:00:00" has no zone' in refusal(
        tmp_path, listed(node_event(1, "a", "NodeReady", lastTimestamp="2024-05-01T10:00:00"))
    )
    assert "line 2: the event's node has no name" in refusal(tmp_path, listed(node_event(1, "", "NodeReady")))
    assert "line 3: " in refusal(tmp_path, listed(good, 5))
    assert "line 2: holds nodes as they are, not events" in refusal(tmp_path, listed({"kind": "Node"}))
    assert "line 3: is no JSON" in refusal(tmp_path, listed(good, good)[:-30])
    assert "no event of a node that comes or goes" in refusal(tmp_path, listed())
    assert "no event of a node that comes or goes" in refusal(tmp_path, listed(EVENTS[3]))
    assert "is no JSON" in refusal(tmp_path, '{"items": ' + "[" * 100_000)
