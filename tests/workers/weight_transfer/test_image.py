import os
import threading
from collections.abc import Iterator

import pytest
import torch
from link_processes import BUCKET_BYTES, SourceProcess, received_checksum, weights

from pearl.types.weights import Snapshot, Version
from pearl.workers.weight_transfer.checksum import dtype_name, tensor_bytes, weights_checksum
from pearl.workers.weight_transfer.errors import SourceGoneError, SupersededError
from pearl.workers.weight_transfer.mapped_image import MappedImage
from pearl.workers.weight_transfer.receiver import Receiver
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore
from pearl.workers.weight_transfer.snapshot_layout import ALIGNMENT, lay_out


@pytest.fixture
def store() -> Iterator[SnapshotStore]:
    store = SnapshotStore(1, 0, "here", BUCKET_BYTES)
    yield store
    store.close()


def constant(value: int, num_bytes: int = 4 * BUCKET_BYTES) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((num_bytes,), value, dtype=torch.uint8))]


def open_image(snapshot: Snapshot) -> MappedImage:
    return MappedImage(snapshot, snapshot.sources[0])


def values(image: MappedImage, snapshot: Snapshot) -> set[int]:
    return {value for bucket in snapshot.buckets for value in set(image.bucket(bucket))}


def test_tensors_start_aligned_and_buckets_cover_the_image(store: SnapshotStore) -> None:
    snapshot = store.publish(Version(0, 1), weights(1))
    assert all(spec.offset % ALIGNMENT == 0 for spec in snapshot.tensors)
    ends = [bucket.offset + bucket.num_bytes for bucket in snapshot.buckets]
    assert [0, *ends] == [*(bucket.offset for bucket in snapshot.buckets), snapshot.num_bytes]
    assert len(snapshot.buckets) == 10


def test_layout_counts_bytes_by_dtype() -> None:
    specs = lay_out([("a", "bfloat16", (3,)), ("b", "float64", ()), ("c", "bool", (0, 2))])
    assert [(spec.offset, spec.num_bytes) for spec in specs] == [(0, 6), (64, 8), (128, 0)]


def test_checksum_of_a_snapshot_is_that_of_its_tensors(store: SnapshotStore) -> None:
    tensors = weights(1)
    snapshot = store.publish(Version(0, 1), reversed(tensors))
    assert snapshot.checksum == weights_checksum(
        (name, dtype_name(t.dtype), tuple(t.shape), tensor_bytes(t)) for name, t in tensors
    )


@pytest.mark.parametrize("bucket_bytes", [0, -64, 100])
def test_a_bucket_size_that_would_cut_elements_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"weights.bucket_bytes = {bucket_bytes}"):
        SnapshotStore(1, 0, "here", bucket_bytes)


def test_no_tensors_are_refused(store: SnapshotStore) -> None:
    with pytest.raises(ValueError, match="no bytes"):
        store.publish(Version(0, 1), [])


def test_memory_is_reused_and_bounded_by_two_images(store: SnapshotStore) -> None:
    paths = [store.publish(Version(0, step), constant(step)).sources[0].path for step in range(6)]
    assert len(set(paths)) == 2


@pytest.mark.scenario("CK-04")
def test_a_reader_keeps_its_version_while_newer_ones_are_published(store: SnapshotStore) -> None:
    first = store.publish(Version(0, 1), constant(1))
    image = open_image(first)
    for step in range(2, 6):
        store.publish(Version(0, step), constant(step))
        assert values(image, first) == {1}
    image.close()
    image.close()


@pytest.mark.scenario("CK-04")
def test_a_joiner_that_comes_late_is_told_so(store: SnapshotStore) -> None:
    first = store.publish(Version(0, 1), constant(1))
    store.publish(Version(0, 2), constant(2))
    open_image(first).close()  # still whole beside the newer one
    store.publish(Version(0, 3), constant(3))
    with pytest.raises(SupersededError, match=r"0:1 was superseded by 0:3"):
        open_image(first)


@pytest.mark.scenario("CK-04")
def test_a_joiner_gets_one_whole_version_while_the_next_replaces_it(store: SnapshotStore) -> None:
    num_superseded = num_whole = 0
    store.publish(Version(0, 0), constant(0))
    stop = threading.Event()

    def publish() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            store.publish(Version(0, step), constant(step % 251))

    publisher = threading.Thread(target=publish)
    publisher.start()
    receiver = Receiver(1, 1)
    try:
        for _ in range(100):
            snapshot = store.latest
            assert snapshot is not None
            try:
                with receiver.receive(snapshot, transport="mapped", deadline_s=5.0) as received:
                    assert received_checksum(received) == snapshot.checksum
                    num_whole += 1
            except SupersededError:
                num_superseded += 1
    finally:
        stop.set()
        publisher.join()
    assert num_whole + num_superseded == 100
    assert num_whole > 0


@pytest.mark.scenario("CK-04")
def test_a_publish_that_fails_leaves_the_version_before(store: SnapshotStore) -> None:
    first = store.publish(Version(0, 1), constant(1))
    specs = lay_out([("a", "uint8", (8,)), ("b", "uint8", (8,))])
    with (
        pytest.raises(ValueError, match="still lacks 'b'"),
        store.writing(Version(0, 2), specs) as writer,
    ):
        writer.write("a", torch.zeros(8, dtype=torch.uint8))
    assert store.latest == first
    image = open_image(first)
    assert values(image, first) == {1}
    image.close()
    assert store.publish(Version(0, 2), constant(2)).version == Version(0, 2)


def test_a_tensor_that_is_not_in_the_layout_is_refused(store: SnapshotStore) -> None:
    specs = lay_out([("a", "uint8", (8,))])
    with (
        pytest.raises(ValueError, match=r"expects .*'a'"),
        store.writing(Version(0, 1), specs) as writer,
    ):
        writer.write("a", torch.zeros(9, dtype=torch.uint8))


def test_pinned_bytes_are_not_overwritten(store: SnapshotStore) -> None:
    store.publish(Version(0, 1), constant(1))
    with store.pinned(Version(0, 1)) as image:
        assert image is not None
        for step in range(2, 5):
            store.publish(Version(0, step), constant(step))
        assert set(image.tolist()) == {1}
    with store.pinned(Version(0, 1)) as gone:
        assert gone is None


def test_a_mapped_image_cannot_shrink_under_its_reader(store: SnapshotStore) -> None:
    snapshot = store.publish(Version(0, 1), constant(1))
    with pytest.raises(PermissionError):
        os.truncate(snapshot.sources[0].path, 64)


def test_another_incarnation_behind_the_same_path_is_not_read(store: SnapshotStore) -> None:
    snapshot = store.publish(Version(0, 1), constant(1))
    source = snapshot.sources[0]
    other = type(source)(source.rank, 2, source.host, source.path, "")
    with pytest.raises(SourceGoneError, match="belongs to incarnation 1, not 2"):
        MappedImage(snapshot, other)


def test_a_path_that_now_names_something_else_is_refused_without_blocking(store: SnapshotStore) -> None:
    snapshot = store.publish(Version(0, 1), constant(1))
    reading, writing = os.pipe()
    try:
        for fd in (reading, writing):
            source = type(snapshot.sources[0])(0, 1, "here", f"/proc/{os.getpid()}/fd/{fd}", "")
            with pytest.raises(SourceGoneError, match="no snapshot image"):
                MappedImage(snapshot, source)
    finally:
        os.close(reading)
        os.close(writing)


def test_the_image_vanishes_with_its_process_but_not_under_a_reader() -> None:
    source = SourceProcess(1)
    snapshot = source.publish(3)
    receiver = Receiver(1, 1)
    received = receiver.receive(snapshot, transport="mapped", deadline_s=5.0)
    source.kill()
    assert received_checksum(received) == snapshot.checksum
    with pytest.raises(SourceGoneError, match="cannot be had"):
        receiver.receive(snapshot, transport="auto", deadline_s=1.0)
