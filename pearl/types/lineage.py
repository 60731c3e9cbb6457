"""Which weight versions are still true. Each restore opens a lineage at a step; later steps of earlier lineages
are dead: their updates were discarded, and so are the tokens made with them."""

import msgspec

from pearl.types.weights import Version


class Restore(msgspec.Struct, frozen=True, array_like=True):
    """Lineage ``lineage`` continues from what its predecessors were at ``step``."""

    lineage: int
    step: int


class Lineages(msgspec.Struct):
    restores: list[Restore] = msgspec.field(default_factory=list)

    def open(self, version: Version) -> None:
        assert not self.restores or version.lineage > self.restores[-1].lineage, (version, self.restores)
        self.restores.append(Restore(version.lineage, version.step))

    @property
    def newest(self) -> int:
        """-1 before the first lineage."""
        return self.restores[-1].lineage if self.restores else -1

    def holds(self, version: Version) -> bool:
        """Whether the weights of ``version`` are an ancestor of, or are, the newest lineage's."""
        for restore in reversed(self.restores):
            if restore.lineage <= version.lineage:
                return True
            if version.step > restore.step:
                return False
        return True
