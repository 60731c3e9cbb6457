"""Which task is to blame when environment workers die: whoever was being asked something at each death.

A death with several tasks being asked leaves each of them suspected; suspects are then asked one at a time, so that
at the next death at most one of them was there. The one that was, or the only one being asked, is blamed; all others
are not. A task that is blamed often enough is not asked again.
"""

from collections import Counter
from typing import NamedTuple

from pearl.types.ids import OpId

DEATHS_TO_REFUSE = 3
"""A task that is blamed for so many deaths is not given to a worker again: less may be chance, as when somebody else
ends workers."""


class Call(NamedTuple):
    task: str
    request: str


class Suspicion:
    def __init__(self) -> None:
        self._asked: dict[str, dict[OpId, Call]] = {}  # by worker
        self._judged: dict[
            str, tuple[str, frozenset[OpId]]
        ] = {}  # of dead workers: the blamed task, and its ops
        self._deaths: Counter[str] = Counter()  # at which the task was among the first suspects
        self._blamed: Counter[str] = Counter()
        self._alone: dict[str, str] = {}  # suspects that have not survived since, and what each was asked

    def begin(self, worker: str, op: OpId, task: str, request: str) -> None:
        """The worker is asked something of the task; ``request`` is the kind of it."""
        self._asked.setdefault(worker, {})[op] = Call(task, request)

    def end(self, worker: str, op: OpId) -> None:
        """Note that a task is no longer in a call: it has answered, or died and been judged."""
        asked = self._asked.get(worker)
        if asked is not None:
            asked.pop(op, None)
            if not asked:
                del self._asked[worker]

    def answered(self, task: str, request: str) -> None:
        """The worker has survived it; a task that was suspected for the like is free of that."""
        if self._alone.get(task) == request:
            del self._alone[task]

    def judge(self, worker: str) -> str:
        """The worker has died. Returns the task that is blamed for it, "" for none, however often it is called."""
        if worker not in self._judged:
            self._judged[worker] = self._judge(self._asked.get(worker, {}))
        return self._judged[worker][0]

    def is_blamed(self, worker: str, op: OpId) -> bool:
        """Return whether the task is to blame for the worker's death."""
        self.judge(worker)
        return op in self._judged[worker][1]

    def must_be_alone(self, task: str) -> bool:
        """Whether no other suspect may be asked anything on the same worker meanwhile."""
        return task in self._alone

    def refusal(self, task: str) -> str:
        """Why the task is not asked again; "" = it is."""
        count = self._blamed[task]
        if count < DEATHS_TO_REFUSE:
            return ""
        return f"task {task} has killed its environment worker {count} times: it is not run again"

    def described(self) -> str:
        """The tasks that are blamed, for the person; "" when there are none."""
        found = [f"task {task} ({count}x)" for task, count in self._blamed.most_common(5)]
        return f"they died under {', '.join(found)}" if found else ""

    def _judge(self, asked: dict[OpId, Call]) -> tuple[str, frozenset[OpId]]:
        tasks = {each.task for each in asked.values() if each.task}
        most = max((self._deaths[task] for task in tasks), default=0)
        first = {task for task in tasks if self._deaths[task] == most}
        self._deaths.update(first)
        self._alone.update({each.task: each.request for each in asked.values() if each.task in first})
        if len(first) != 1:
            return "", frozenset()
        (guilty,) = first
        self._blamed[guilty] += 1
        return guilty, frozenset(op for op, each in asked.items() if each.task == guilty)
