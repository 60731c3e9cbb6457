"""For environments that render their whole conversation by a template: what a new rendering adds to the old one."""

from collections.abc import Sequence

from pearl.envs.protocol import InfrastructureError


def appended_ids(history: Sequence[int], rendered: Sequence[int]) -> list[int]:
    """The ids that ``rendered`` has after ``history``, which must be its beginning.

    A template that changes what was said before (one that drops earlier thinking, say) would make the model train on
    a context it never saw.

    Raises:
        InfrastructureError: it was rewritten; names the first position that differs.
    """
    for position, (old, new) in enumerate(zip(history, rendered, strict=False)):
        if old != new:
            raise InfrastructureError(
                f"the template rewrites its history: position {position} was id {old} and is now {new}; "
                "use a template that only appends"
            )
    if len(rendered) < len(history):
        raise InfrastructureError(
            f"the template rewrites its history: of {len(history)} ids it keeps {len(rendered)}; "
            "use a template that only appends"
        )
    return list(rendered[len(history) :])
