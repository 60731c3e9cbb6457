"""File descriptors: raised as far as allowed before they run out, because running out hurts unrelated parts."""

import resource


def check_fd_limit(needed: int) -> str | None:
    """Raise the soft limit up to the hard one if ``needed`` descriptors would not fit.

    Returns a warning that says what to do when even the hard limit is too low; start then with less concurrency.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    target = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if target >= needed:
        return None
    return (
        f"about {needed} file descriptors are needed, the hard limit is {hard}: raise it (ulimit -Hn {needed}, or "
        "LimitNOFILE= of the service), or lower rollout.max_in_flight and the number of workers"
    )
