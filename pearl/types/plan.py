"""What a decision aims at and what is changed to get there (paper §4.4.2): one format for both kinds of elasticity."""

import re
from typing import Literal

import msgspec

from pearl.types.ids import Slot

Role = Literal["colocated", "prefill", "decode"]

_DISAGGREGATED = re.compile(r"(\d{1,6})P(\d{1,6})D", re.ASCII)
_COLOCATED = re.compile(r"(\d{1,6})C", re.ASCII)


class Allocation(msgspec.Struct, frozen=True, order=True):
    """Workers a role (N_P, N_D, N_C): fully colocated or fully disaggregated. Printed as "4P9D" or "13C"."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def is_colocated(self) -> bool:
        return self.prefill == self.decode == 0

    @property
    def is_whole(self) -> bool:
        """One mode, and able to serve by itself."""
        if self.is_colocated:
            return self.colocated > 0
        return self.colocated == 0 and min(self.prefill, self.decode) > 0

    def count(self, role: Role) -> int:
        count: int = getattr(self, role)
        return count

    def less(self, part: "Allocation") -> "Allocation":
        """Without a part that it contains."""
        return Allocation(
            self.prefill - part.prefill, self.decode - part.decode, self.colocated - part.colocated
        )

    def __str__(self) -> str:
        if self.is_colocated:
            return f"{self.colocated}C"
        rest = f"+{self.colocated}C" if self.colocated else ""  # as long as a plan runs
        return f"{self.prefill}P{self.decode}D{rest}"

    @classmethod
    def parse(cls, text: str) -> "Allocation":
        """ValueError for anything but "3P5D" (both at least 1) or "8C"."""
        if found := _DISAGGREGATED.fullmatch(text):
            prefill, decode = map(int, found.groups())
            if prefill and decode:
                return cls(prefill=prefill, decode=decode)
        elif found := _COLOCATED.fullmatch(text):
            return cls(colocated=int(found[1]))
        raise ValueError(f'"{text}" is no allocation; give for example "3P5D" or "8C"')


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    slot: Slot
    role: Role


class Plan(msgspec.Struct, frozen=True):
    """(W_add, W_remove, rho): who joins in which role, who leaves, which survivors change to which role."""

    add: tuple[Assignment, ...] = ()
    remove: tuple[Slot, ...] = ()
    rebind: tuple[Assignment, ...] = ()
