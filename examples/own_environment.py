"""An environment of one's own: name the digit after the one that was shown; a wrong answer may be mended."""

from pearl.envs.protocol import EnvironmentSpec, Observation, Split

WORDS = ["<pad>", "<end>", "after", "wrong", *"0123456789"]
END, AFTER, WRONG = 1, 2, 3
FIRST_DIGIT = 4


class NextDigit:
    def __init__(self, *, num_digits: int = 10) -> None:  # keywords are environment.options of the job
        self.num_digits = num_digits

    def describe(self) -> EnvironmentSpec:
        return EnvironmentSpec(
            vocabulary_size=len(WORDS),
            stop_ids=(END,),  # the ids that end a turn
            pad_id=0,
            num_train_tasks=0,  # 0 = as many as are asked for
            num_evaluation_tasks=self.num_digits,
            can_restore=True,  # the same actions always give the same observations
        )

    def episode(self, split: Split, task: int) -> "Episode":
        return Episode(task % self.num_digits, self.num_digits)


class Episode:
    def __init__(self, digit: int, num_digits: int) -> None:
        self.digit, self.answer = digit, (digit + 1) % num_digits

    def reset(self) -> list[int]:
        return [AFTER, FIRST_DIGIT + self.digit]

    def step(self, action: list[int], truncated: bool) -> Observation:
        if action and action[0] == FIRST_DIGIT + self.answer:
            return Observation([], reward=1.0, done=True)
        return Observation([WRONG, AFTER, FIRST_DIGIT + self.digit], reward=0.0, done=False)
