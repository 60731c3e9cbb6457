"""Platform speed from engine iterations, by least squares:

    seconds = A + b * decoding + c * their context + t_prefill * prefilled tokens

Prefill workers have a fixed cost of their own, so that it does not leak into the A of workers that decode. Contexts
grow while sequences become fewer: a fit without them takes what they cost for a larger A and a smaller b, so they are
left out only where they tell nothing. A fit that cannot be physical, or that the data do not determine, is refused: it
comes back as the reason.
"""

from collections.abc import Sequence

import msgspec

from pearl.types.profile import IterationSums

NOTHING = IterationSums(*[0.0] * len(IterationSums.__struct_fields__))
MIN_ITERATIONS = 32
"""Fewer say more about noise than about the platform."""
MAX_RELATIVE_ERROR = 0.1
"""A coefficient's standard error may be this part of the mean iteration: beyond, it is noise that looks like a fit."""
SINGULAR = 1e-9
"""A pivot this small beside its diagonal element means that nothing varied."""

Matrix = list[list[float]]


class IterationFit(msgspec.Struct, frozen=True):
    decode_fixed_seconds: float | None  # A; None where no iteration tells
    decode_seconds_per_seq: float | None  # b, at no context where the next is not 0
    prefill_seconds_per_token: float | None  # t_prefill
    decode_seconds_per_context_token: float = 0.0

    def decode_seconds_at(self, context_tokens: float) -> float | None:
        """b of a sequence with that context."""
        per_seq = self.decode_seconds_per_seq
        return None if per_seq is None else per_seq + self.decode_seconds_per_context_token * context_tokens


def add(one: IterationSums, other: IterationSums) -> IterationSums:
    return _zip(one, other, 1.0)


def fade(sums: IterationSums, weight: float, newest: IterationSums) -> IterationSums:
    """The old sums count ``weight``, the newest fully."""
    return _zip(newest, sums, weight)


def _zip(one: IterationSums, other: IterationSums, weight: float) -> IterationSums:
    left, right = msgspec.structs.astuple(one), msgspec.structs.astuple(other)
    sums = [a + weight * b for a, b in zip(left, right, strict=True)]
    return IterationSums(*sums)


FIXED, PREFILL_FIXED, PER_SEQUENCE, PER_TOKEN, PER_CONTEXT_TOKEN = range(5)
NAMES = ("A", "A of prefill workers", "b", "t_prefill", "b a context token")
CHOICES: tuple[tuple[int, ...], ...] = (
    (FIXED, PREFILL_FIXED, PER_SEQUENCE, PER_TOKEN, PER_CONTEXT_TOKEN),
    (FIXED, PREFILL_FIXED, PER_TOKEN, PER_CONTEXT_TOKEN),
    (FIXED, PREFILL_FIXED, PER_SEQUENCE, PER_TOKEN),
)
"""Unknowns to fit. What a sequence costs whatever its context, and by its context, cannot always be told apart."""


class Solution(msgspec.Struct, frozen=True):
    values: dict[int, float]
    unexplained: float  # sum of squared residuals


def fit(serving: IterationSums, prefilling: IterationSums) -> IterationFit | str:
    """Fit workers that decode (``serving``: colocated, decode) and prefill workers together.

    Returns:
        The coefficients that were observed, of all fits that may be used the one that leaves the least unexplained; or
        why none must be used.
    """
    count = serving.count + prefilling.count
    if count < MIN_ITERATIONS:
        return f"{count:.0f} iterations are fewer than {MIN_ITERATIONS}"
    choices = CHOICES if serving.context2 > 0 else CHOICES[2:]
    found = [_solve(choice, serving, prefilling) for choice in choices]
    usable = [solution for solution in found if isinstance(solution, Solution)]
    if not usable:
        return str(found[-1])
    values = min(usable, key=lambda solution: solution.unexplained).values
    per_context = values.get(PER_CONTEXT_TOKEN, 0.0)
    per_seq = values.get(PER_SEQUENCE, 0.0 if PER_CONTEXT_TOKEN in values else None)
    return IterationFit(values.get(FIXED), per_seq, values.get(PER_TOKEN), per_context)


def _solve(choice: Sequence[int], serving: IterationSums, prefilling: IterationSums) -> Solution | str:
    matrix, target = _normal_equations(serving, prefilling)
    used = [index for index in choice if matrix[index][index] > 0]
    reduced = [[matrix[row][column] for column in used] for row in used]
    inverse = _inverse(reduced)
    if inverse is None:
        return "nothing varied: the iterations do not tell the coefficients apart"
    aim = [target[index] for index in used]
    solution = [sum(a * b for a, b in zip(row, aim, strict=True)) for row in inverse]
    explained = sum(a * b for a, b in zip(solution, aim, strict=True))
    unexplained = max(0.0, serving.seconds2 + prefilling.seconds2 - explained)
    count = serving.count + prefilling.count
    mean = ((serving.seconds2 + prefilling.seconds2) / count) ** 0.5
    problem = _problem(used, solution, inverse, reduced, unexplained, mean, count)
    return problem or Solution(dict(zip(used, solution, strict=True)), unexplained)


def _normal_equations(serving: IterationSums, prefilling: IterationSums) -> tuple[Matrix, list[float]]:
    """X'X and X'y for the unknowns in ``NAMES``; prefill workers decode nothing."""
    s, p = serving, prefilling
    matrix = [
        [float(s.count), 0.0, s.decoding, s.prefill, s.context],
        [0.0, float(p.count), 0.0, p.prefill, 0.0],
        [s.decoding, 0.0, s.decoding2, s.decoding_prefill, s.decoding_context],
        [s.prefill, p.prefill, s.decoding_prefill, s.prefill2 + p.prefill2, s.prefill_context],
        [s.context, 0.0, s.decoding_context, s.prefill_context, s.context2],
    ]
    return matrix, [
        s.seconds,
        p.seconds,
        s.seconds_decoding,
        s.seconds_prefill + p.seconds_prefill,
        s.seconds_context,
    ]


def _problem(
    used: Sequence[int],
    solution: Sequence[float],
    inverse: Matrix,
    matrix: Matrix,
    unexplained: float,
    mean: float,
    count: float,
) -> str:
    """Why the solution must not be used; "" = it may. ``mean``: seconds of an iteration."""
    for index, value in zip(used, solution, strict=True):
        if value < 0:
            return f"{NAMES[index]} = {value:.3g} s is negative"
    variance = unexplained / max(count - len(used), 1.0)
    for position, index in enumerate(used):
        typical = (matrix[position][position] / count) ** 0.5  # root mean square of its regressor
        error = (variance * max(inverse[position][position], 0.0)) ** 0.5 * typical
        if error > MAX_RELATIVE_ERROR * mean:
            return f"{NAMES[index]} is not determined: its error is {error / mean:.0%} of an iteration"
    return ""


def _inverse(matrix: Matrix) -> Matrix | None:
    """Gauss-Jordan on a matrix scaled to a unit diagonal; None when it is singular."""
    size = len(matrix)
    scale = [matrix[index][index] ** 0.5 for index in range(size)]
    work = [
        [matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [float(i == j) for j in range(size)]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[pivot][column]) < SINGULAR:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        _eliminate(work, column)
    return [[work[i][size + j] / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]


def _eliminate(work: Matrix, column: int) -> None:
    lead = work[column][column]
    work[column] = [value / lead for value in work[column]]
    for row, values in enumerate(work):
        if row != column and values[column]:
            factor = values[column]
            work[row] = [a - factor * b for a, b in zip(values, work[column], strict=True)]
