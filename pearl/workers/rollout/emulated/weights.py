"""Takes an update of the emulated weights as strictly as a model would."""

from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.emulated_model import NUM_BYTES, TENSORS


class IncomingWeights:
    """One update; buckets may come in any order and more than once."""

    def __init__(self, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        """Raises ValueError when the tensors are not exactly those of the emulated model."""
        known = {spec.name: spec for spec in TENSORS}
        for spec in tensors:
            if spec != known.get(spec.name):
                raise ValueError(
                    f"tensor {spec.name!r} comes as {spec}, the model has {known.get(spec.name)}"
                )
        missing = known.keys() - {spec.name for spec in tensors}
        if missing:
            raise ValueError(f"the update lacks tensor {min(missing)!r} of the model")
        self.version = version
        self._image = bytearray(NUM_BYTES)
        self._is_there = bytearray(NUM_BYTES)

    def add(self, bucket: BucketSpec, data: memoryview) -> None:
        if data.nbytes != bucket.num_bytes or not 0 <= bucket.offset <= NUM_BYTES - bucket.num_bytes:
            raise ValueError(
                f"bucket at {bucket.offset} of {bucket.num_bytes} bytes comes with {data.nbytes} bytes; "
                f"the image has {NUM_BYTES}"
            )
        place = slice(bucket.offset, bucket.offset + bucket.num_bytes)
        self._image[place] = data
        self._is_there[place] = b"\1" * bucket.num_bytes

    def whole(self) -> bytes:
        """The image. Raises ValueError when bytes are missing."""
        for spec in TENSORS:
            if not all(self._is_there[spec.offset : spec.offset + spec.num_bytes]):
                raise ValueError(f"the update ended without all bytes of tensor {spec.name!r}")
        return bytes(self._image)
