"""Keys and values in one worker's memory: what running sequences hold, and the prefixes kept for reuse.

Counted in tokens. A trajectory's context is kept after its turn until memory is short, the oldest first; members of a
group share their prompt, so the first to compute it spares the others. Nothing is kept under new weights.
"""

from collections import OrderedDict


class KvCache:
    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.cached_tokens = 0
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()  # trajectory -> (prompt, tokens)
        self._prompts: dict[int, int] = {}  # prompt -> trajectories here that hold it

    def claim(self, trajectory: int, prompt: int, prompt_tokens: int, context_tokens: int) -> int:
        """Start a sequence and return how many tokens of its context need no prefill, never all of them."""
        kept = self._kept.pop(trajectory, None)
        hit = 0
        if kept is not None:
            hit = kept[1]
            self.cached_tokens -= hit
        elif prompt in self._prompts:
            hit = prompt_tokens
        if kept is None:
            self._prompts[prompt] = self._prompts.get(prompt, 0) + 1
        return min(hit, context_tokens - 1)

    def kept_tokens(self, trajectory: int) -> int:
        kept = self._kept.get(trajectory)
        return 0 if kept is None else kept[1]

    def keep(self, trajectory: int, prompt: int, tokens: int) -> None:
        """Keep the prefix of a sequence that ended with that much context."""
        self._kept[trajectory] = (prompt, tokens)
        self.cached_tokens += tokens

    def drop(self, prompt: int) -> None:
        """Discard a running sequence's keys and values."""
        left = self._prompts[prompt] - 1
        if left:
            self._prompts[prompt] = left
        else:
            del self._prompts[prompt]

    def fit(self, running_tokens: int) -> None:
        """Evict the oldest prefixes until what is kept fits beside the running sequences."""
        while self._kept and running_tokens + self.cached_tokens > self.capacity_tokens:
            _, (prompt, tokens) = self._kept.popitem(last=False)
            self.cached_tokens -= tokens
            self.drop(prompt)

    def forget(self, trajectory: int) -> None:
        """Drop the prefix of a trajectory that ended or starts again."""
        kept = self._kept.pop(trajectory, None)
        if kept is not None:
            self.cached_tokens -= kept[1]
            self.drop(kept[0])

    def flush(self) -> None:
        """Drop everything: keys and values of old weights are not reused under new ones."""
        for trajectory in list(self._kept):
            self.forget(trajectory)
