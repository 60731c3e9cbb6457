"""Policies as data: each is a set of settings on the axes inter, borrow and pd, with a router and a way to start.

The systems of the paper's Table 1 are aliases for their points on these axes; ``caveat`` says what of them is not
modelled.
"""

from typing import NamedTuple

from pearl.config import ConfigError
from pearl.config.suggestions import nearest


class Policy(NamedTuple):
    """A named policy. ``overrides`` are written as on the command line; with ``pool_of_trace`` it has, instead of
    preemptible GPUs, as many reserved ones as the trace has on average, rounded up to whole workers."""

    overrides: tuple[str, ...]
    about: str
    pool_of_trace: bool = False
    caveat: str = ""


def _policy(
    about: str,
    *,
    inter: bool = False,
    borrow: str = "never",
    pd: str = "colocated",
    router: str = "cache-aware",
    start: str = "strict",
    pool_of_trace: bool = False,
) -> Policy:
    overrides = (
        f"elastic.inter={str(inter).lower()}",
        f"elastic.borrow={borrow}",
        f"elastic.pd={pd}",
        "elastic.makespan=closed-form",
        f"rollout.router={router}",
        f"rollout.start={start}",
    )
    return Policy(overrides, about, pool_of_trace)


POLICIES: dict[str, Policy] = {
    "config": Policy((), "the file's own settings"),
    "pearl": _policy(
        "both kinds of elasticity, roles by decision, strict batches as in the paper",
        inter=True,
        borrow="gated",
        pd="adaptive",
    ),
    "pearl+": _policy("pearl, with early start", inter=True, borrow="gated", pd="adaptive", start="early"),
    "colocated+": _policy("pearl without roles: what PD has to beat", inter=True, borrow="gated"),
    "roll": _policy("reserved GPUs only, each trajectory on one worker", router="sticky"),
    "roll-large": _policy(
        "roll with as many reserved GPUs as the trace has on average", router="sticky", pool_of_trace=True
    ),
    "rlboost+": _policy("preemptible GPUs, no borrowing, no roles", inter=True, router="sticky"),
    "a": _policy("roll with roles by decision", pd="adaptive"),
    "a+b": _policy("and training GPUs lent whenever they idle", pd="adaptive", borrow="always"),
    "a+b+c": _policy("and lent only when the gate expects a gain", pd="adaptive", borrow="gated"),
}

_ALIASES: dict[str, tuple[str, str]] = {
    "areal": ("roll", "its staleness control by rate and its decoupled objective do not matter here"),
    "laminar": ("roll", "its relay workers for weights are not modelled; every push costs the same"),
    "rlboost": ("rlboost+", "its partial hybrid colocation of training GPUs is not modelled"),
    "rose": ("rlboost+", "serving GPUs with their own traffic are taken for preemptible ones"),
    "seamlessflow": ("borrow", "its tags may bind any machine; here training GPUs are lent as one"),
    "bidirl": ("borrow", "training on rollout GPUs, its other direction, is not modelled"),
    "rollart": ("static-pd", "serverless rewards and hardware affinity are not modelled"),
    "nemo-rl": ("static-pd", "its ratio is the person's choice; 3P5D stands for it"),
    "slime": ("static-pd", "its ratio is the person's choice; 3P5D stands for it"),
}
_POINTS = {
    "borrow": _policy("training GPUs lent whenever they idle, no roles", borrow="always", router="sticky"),
    "static-pd": _policy("fixed roles on reserved GPUs", pd="3P5D"),
}


def find(name: str) -> Policy:
    """Find a policy by name; raises ConfigError with a suggestion when there is none."""
    if name in POLICIES:
        return POLICIES[name]
    if name in _ALIASES:
        base, caveat = _ALIASES[name]
        return (POLICIES.get(base) or _POINTS[base])._replace(caveat=caveat)
    guess = nearest(name, names())
    hint = f"did you mean {guess}?" if guess else f"there are {', '.join(names())}"
    raise ConfigError(f'--policy: "{name}" is unknown; {hint}')


def names() -> list[str]:
    return [*POLICIES, *_ALIASES]
