"""The weights in SGLang: how an update gets there, and the proof of what it holds."""

import asyncio

from pearl.types.weights import BucketSpec, TensorSpec, Version
from pearl.workers.rollout.sglang.api import SglangApi
from pearl.workers.rollout.sglang.model_files import Model
from pearl.workers.rollout.sglang.settings import SglangSettings
from pearl.workers.rollout.sglang.weights import StagedWeights, answers, complaints

ANSWER_NAME = "loaded"


class Loading:
    """``staged`` is the newest update: being filled, or whole and kept for an SGLang that is started anew."""

    def __init__(self, settings: SglangSettings) -> None:
        self.staged: StagedWeights | None = None
        self.checksum = ""
        """Of what was loaded last, as published."""
        self._settings = settings
        self._digest = ""  # SGLang's own, of the same

    def stage(self, model: Model, version: Version, tensors: tuple[TensorSpec, ...]) -> None:
        """Begin an update in the memory of the last one. Raises ValueError when the tensors are not exactly those of
        the model."""
        memory = None if self.staged is None else self.staged.memory
        self.staged = StagedWeights(model, version, tensors, memory)

    async def add(self, bucket: BucketSpec, data: memoryview) -> None:
        """Stage one bucket in a thread, while the event loop goes on; ``data`` may be reused when this has ended, in
        whatever way."""
        assert self.staged is not None
        copying = asyncio.get_running_loop().run_in_executor(None, self.staged.add, bucket, data)
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError:
            await asyncio.wait([copying])  # for one bucket's time: the thread reads ``data`` until then
            raise
        copying.result()

    def drop(self) -> None:
        if self.staged is not None:
            self.staged.close()
            self.staged = None

    async def load(self, api: SglangApi) -> Version:
        """Load what is staged into SGLang and return the proof that it is there. ValueError when it is not."""
        staged, ranks = self.staged, self._settings.num_gpus
        assert staged is not None
        answer = self._settings.model_directory / ANSWER_NAME
        await api.load_weights(staged.order(answer, ranks), str(staged.version))
        said = answers(answer, ranks)
        if complaint := complaints(said):
            raise ValueError(f"the update was not loaded: {complaint}")
        # Of the very bytes that every rank has compared its parameters with, summed after that.
        self.checksum = await asyncio.to_thread(staged.checksum)
        self._digest = await api.digest()
        return staged.version

    async def proof(self, api: SglangApi, version: Version | None) -> str:
        """The checksum of ``version``, which was loaded last and must still be there; of None, SGLang's own digest of
        whatever it holds, equal to no published checksum."""
        digest = await api.digest()
        if version is None:
            return digest
        if digest != self._digest:
            raise ValueError(f"SGLang's weights have changed since {version} was loaded")
        return self.checksum
