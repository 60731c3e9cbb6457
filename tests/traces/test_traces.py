"""Traces: the same events however the file was saved, the recorded files, and refusals that show the way out."""

import gzip
from pathlib import Path

import pytest

from pearl.traces import TraceError, at_most, counts, read_trace
from pearl.types.trace import TraceEvent

SHIPPED = Path(__file__).parents[2] / "launch" / "traces"
PLAIN = "# from a cluster\nt_s,preemptible_gpus,rollout_gpus\n0,2,6\n60,4,8\n180,3,7\n"


def arrive(at_s: float, count: int) -> TraceEvent:
    return TraceEvent("arrive", at_s=at_s, count=count)


def reclaim(at_s: float, count: int) -> TraceEvent:
    return TraceEvent("reclaim", at_s=at_s, count=count)


def read(tmp_path: Path, text: str | bytes, **options: float) -> list[TraceEvent]:
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(
        path, speed=options.get("speed", 1.0), gpus_per_node=int(options.get("gpus_per_node", 1))
    )


def saved_in_six_ways(text: str) -> list[bytes]:
    plain = text.encode()
    crlf = text.replace("\n", "\r\n").encode()
    bom = b"\xef\xbb\xbf"
    return [
        plain,
        bom + plain,
        crlf,
        bom + crlf,
        plain.rstrip(b"\n"),
        plain + b"\n\n",
        gzip.compress(plain, mtime=0),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, [arrive(0, 2), arrive(60, 2), reclaim(180, 1)]),
        ("0,add,a\n0,add,b\n500,remove,a\n", [arrive(0, 2), reclaim(0.5, 1)]),
        (
            '{"time_s": 1, "arrive": 2}\n{"time_s": 2.5, "reclaim": 1}\n',
            [arrive(1, 2), reclaim(2.5, 1)],
        ),
        ("t_s,gpus\n0,1\n10,1\n20,0\n", [arrive(0, 1), reclaim(20, 1)]),
    ],
)
@pytest.mark.scenario("TR-01")
def test_the_same_trace_however_it_was_saved(text: str, expected: list[TraceEvent], tmp_path: Path) -> None:
    for data in saved_in_six_ways(text):
        assert read(tmp_path, data) == expected


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*_seg?.csv")), ids=lambda path: path.stem)
def test_segments_give_their_own_counts_back(path: Path) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines() if line[0].isdigit()]
    assert len(rows) > 10
    level = 0
    expected = []
    for time, count, _ in rows:
        if int(count) != level:
            expected.append((float(time), int(count)))
        level = int(count)
    assert counts(read_trace(path)) == expected


@pytest.mark.parametrize(("name", "most", "last_s"), [("p3", 32, 40920.0), ("g4dn", 24, 38760.0)])
def test_recorded_event_files(name: str, most: int, last_s: float) -> None:
    events = read_trace(SHIPPED / f"bamboo_{name}.csv")
    capacity = counts(events)
    assert max(gpus for _, gpus in capacity) == most
    assert min(gpus for _, gpus in capacity) >= 0
    assert capacity[-1][0] == last_s
    assert [event.at_s or 0 for event in events] == sorted(event.at_s or 0 for event in events)


def test_quickstart_trace_goes_by_step() -> None:
    assert read_trace(SHIPPED / "quickstart.jsonl", speed=60) == [
        TraceEvent("arrive", at_step=1, count=1),
        TraceEvent("reclaim", at_step=25, count=1, grace_s=5),
    ]


def test_named_gpus_and_grace(tmp_path: Path) -> None:
    text = '{"step": 3, "reclaim": ["a/0", "b/1"], "grace_s": 5}\n{"step": 3, "arrive": ["a/0"]}\n'
    assert read(tmp_path, text) == [
        TraceEvent("reclaim", at_step=3, gpus=("a/0", "b/1"), grace_s=5.0),
        TraceEvent("arrive", at_step=3, gpus=("a/0",)),
    ]


def test_speed_shortens_times_and_leaves_the_grace(tmp_path: Path) -> None:
    events = read(tmp_path, '{"time_s": 120, "reclaim": 1, "grace_s": 20}', speed=60)
    assert events == [TraceEvent("reclaim", at_s=2.0, count=1, grace_s=20.0)]
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="give a number above 0"):
            read(tmp_path, "t_s,gpus\n0,1\n", speed=speed)


def test_a_node_may_have_several_gpus(tmp_path: Path) -> None:
    text = "0,add,a\n0,add,b\n1000,remove,b\n1000,add,b\n"
    assert read(tmp_path, text, gpus_per_node=8) == [arrive(0, 16), reclaim(1, 8), arrive(1, 8)]
    with pytest.raises(ValueError, match="gpus_per_node 0"):
        read(tmp_path, text, gpus_per_node=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# only\n\n  \n", "is empty"),
        ("hello\n", 'line 1: "hello" begins no trace that is known'),
        ("time,gpus\n0,1\n", "counts with the line"),
        ('[{"time_s": 0, "arrive": 1}]', "begins no trace that is known"),
        # event files
        ("0,add,a\n1,ad,b\n", 'line 2: "ad" is neither add nor remove'),
        ("0,add,a\n5,add,a\n", 'line 2: node "a" is added, but it is there since line 1'),
        ("0,add,a\n\n5,remove,b\n", 'line 3: node "b" is removed, but it is not there'),
        ("5,add,a\n4,add,b\n", "line 2: the time in ms 4 comes after 5; sort the lines"),
        ("0,add,a\nx,add,b\n", 'line 2: the time in ms "x" is no finite number'),
        ("0,add,a\nnan,add,b\n", '"nan" is no finite number'),
        ("0,add,a\n1e999,add,b\n", '"1e999" is no finite number'),
        ("0,add,a\n1_0,add,b\n", '"1_0" is no finite number'),
        ("-1,add,a\n", "-1 is negative"),
        ("0,add\n", 'has 2 value(s), not 3; it must look like "480000,add,node1"'),
        ("0,add,\n", "names no node"),
        # counts
        ("t_s,gpus\n", "the trace is empty"),
        ("t_s,rollout_gpus\n0,1\n", "has no column called preemptible_gpus or gpus"),
        ("t_s,gpus,t_s\n0,1,0\n", 'two columns are called "t_s"'),
        ("t_s,gpus\n0,1\n5\n", 'line 3: "5" has 1 value(s), not 2'),
        ("t_s,gpus\n0,1\n5,\n", 'line 3: gpus "" is no finite number'),
        ("t_s,gpus\n0,-1\n", "gpus -1 is negative"),
        ("t_s,gpus\n0,1.5\n", "gpus 1.5 is no count of GPUs"),
        ("t_s,gpus\n0,9999999\n", "is no count of GPUs"),
        ("t_s,gpus\n9,1\n8,1\n", "line 3: t_s 8 comes after 9"),
        # JSON lines
        ('{"time_s": 1, "arrive": 1', "line 1: is no JSON object"),
        ('{"time_s": 1, "arive": 1}', "arive"),
        ('{"time_s": 1, "time_s": 2, "arrive": 1}', "a key is there twice"),
        ('{"arrive": 1}', 'give one of "time_s" and "step"'),
        ('{"time_s": 1, "step": 1, "arrive": 1}', 'give one of "time_s" and "step"'),
        ('{"time_s": 1}', 'give one of "arrive" and "reclaim"'),
        ('{"time_s": 1, "arrive": 1, "reclaim": 1}', 'give one of "arrive" and "reclaim"'),
        ('{"time_s": NaN, "arrive": 1}', "NaN is no number that a trace can hold"),
        ('{"time_s": 1e999, "arrive": 1}', "is no finite number"),
        ('{"time_s": "1", "arrive": 1}', "Expected `float | null`, got `str`"),
        ('{"step": -1, "arrive": 1}', "step -1 is negative"),
        ('{"step": 1.5, "arrive": 1}', "step"),
        ('{"step": 1, "arrive": 0}', "arrive 0 is no count"),
        ('{"step": 1, "arrive": true}', "arrive"),
        ('{"step": 1, "arrive": []}', "names no GPU"),
        ('{"step": 1, "arrive": [""]}', "names no GPU"),
        ('{"step": 1, "arrive": ["a/0", "a/0"]}', "names a GPU twice"),
        ('{"step": 1, "reclaim": 1, "grace_s": -5}', "grace_s -5.0 is negative"),
        ('{"step": 1, "arrive": 1, "grace_s": 5}', "belongs to a reclaim"),
        ('{"step": 2, "arrive": 1}\n{"step": 1, "arrive": 1}', "line 2: step 1 comes after 2"),
        (
            '{"step": 2, "arrive": 1}\n{"time_s": 9, "arrive": 1}',
            'it goes by "time_s", the lines before by "step"',
        ),
        ('{"step": 1, "arrive": ["a/0"]}\n{"step": 2, "arrive": ["a/0"]}', "there already"),
        ('{"step": 1, "reclaim": ["a/0"]}\n{"step": 2, "reclaim": ["a/0"]}', "gone already"),
    ],
)
def test_broken_traces_are_refused_with_line_value_and_way_out(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "trace"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x93NUMPY\x01\xff", "is not UTF-8 text"),
        (b"t_s,gpus\n0,\x001\n", "holds binary data"),
        (PLAIN.encode("utf-16"), "is no trace"),
        (gzip.compress(PLAIN.encode(), mtime=0)[:-9], "cut short"),
        (gzip.compress(PLAIN.encode(), mtime=0) + b"x", "something comes after"),
        (b"\x1f\x8bnonsense", "damaged gzip data"),
        (gzip.compress(bytes(65 << 20), mtime=0), "is larger than 64 MiB"),
    ],
)
def test_what_is_no_text_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=said):
        read(tmp_path, data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent")


def test_counts_begin_with_what_a_trace_takes_for_granted() -> None:
    events = [reclaim(5, 3), arrive(9, 1), arrive(9, 2)]
    assert counts(events) == [(0.0, 3), (5.0, 0), (9.0, 3)]
    assert counts([]) == []


def test_a_smaller_pool_sees_the_part_of_a_trace_that_fits() -> None:
    events = [arrive(0, 5), reclaim(1, 1), reclaim(2, 3), arrive(3, 9), reclaim(4, 9)]
    assert at_most(events, 2) == [arrive(0, 2), reclaim(2, 1), arrive(3, 1), reclaim(4, 1)]
    assert at_most(events, 100) == events
    named = TraceEvent("arrive", at_s=1.0, gpus=("a/0",))
    assert at_most([named], 0) == [named]
