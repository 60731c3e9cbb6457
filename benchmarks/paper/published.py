"""What the paper reports, as numbers, each with the section that it stands in.

Figures are known from the text: where it gives a range over bars only, the range is here and no bar is guessed.
"""

from typing import NamedTuple


class Said(NamedTuple):
    """Of a value or a range, both ends included."""

    low: float
    high: float
    source: str

    @property
    def text(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


def one(value: float, source: str) -> Said:
    return Said(value, value, source)


# Fig. 2(a): Qwen3-8B, 8 training GPUs
TRAIN_SECONDS = one(163.8, "3.1")
ONE_TRAJECTORY_SECONDS = one(216.3, "3.1")
ROLLOUT_OVER_TRAINING = Said(4.5, 5.7, "3.1")
ROLLOUT_TIME_CUT = {24: one(10.3, "3.1"), 32: one(19.2, "3.1")}
"""Percent less than with 16 GPUs."""

# Fig. 2(b): Qwen3-30B-A3B
PREFILLED_PER_GENERATED = one(29.1, "3.2, 96.68 % of the tokens")

# Fig. 2(c): Qwen3-30B-A3B, 8 workers: gain of the best disaggregated configuration over colocation, percent
DISAGGREGATION_GAIN = {32: one(9.7, "3.3"), 80: one(1.4, "3.3"), 96: one(-6.1, "3.3")}
BEST_RATIO = {48: "4P4D", 64: "5P3D"}

# Fig. 4
MEAN_GPUS = {1: 13.6, 2: 9.0, 3: 11.8}
LARGE_POOL = {1: 14, 2: 10, 3: 12}

# Fig. 5: percent over RLBoost+ by segment, and times ROLL over the segments
OVER_RLBOOST = {
    "8b": {1: one(5.9, "6.2"), 2: one(26.9, "6.2"), 3: one(10.6, "6.2")},
    "30b": {1: one(7.4, "6.2"), 2: one(36.3, "6.2"), 3: one(19.0, "6.2")},
}
OVER_ROLL = {"8b": Said(2.17, 2.37, "6.2"), "30b": Said(2.43, 2.79, "6.2")}

# Fig. 7: percent over ROLL, by model and dedicated GPUs
ABLATION = {
    ("8b", 4): {"a": one(-20.6, "6.3"), "a+b": one(93.6, "6.3"), "a+b+c": one(92.3, "6.3")},
    ("30b", 4): {"a": one(-30.9, "6.3"), "a+b": one(118.3, "6.3"), "a+b+c": one(129.5, "6.3")},
}
ABLATION_8_TO_16 = {
    "8b": {"a": Said(12.8, 15.3, "6.3"), "a+b": Said(16.2, 26.5, "6.3"), "a+b+c": Said(17.9, 26.5, "6.3")},
    "30b": {"a": Said(7.8, 8.9, "6.3"), "a+b": Said(9.4, 26.2, "6.3"), "a+b+c": Said(9.2, 27.5, "6.3")},
}

# Fig. 8: percent over RLBoost+, Qwen3-8B, 8 dedicated GPUs
BATCH_GAIN = Said(5.3, 63.7, "6.4")
PEAK_BATCH = {"rlboost+": 64, "pearl": 96}
LENGTH_GAIN = Said(9.8, 26.5, "6.4")

# Table 2: workers -> (dedicated GPUs, overlap, selected, empirical best)
RATIOS = {
    5: (10, "no", "2P3D", "2P3D"),
    6: (12, "no", "3P3D", "3P3D"),
    8: (16, "no", "3P5D", "3P5D"),
    13: (10, "yes", "4P9D", "5P8D"),
    14: (12, "yes", "4P10D", "4P10D"),
    16: (16, "yes", "4P12D", "4P12D"),
}

# Table 3: seconds
COSTS = {
    "preparation": {"8b": 56.29, "30b": 67.06},
    "finalization": {"8b": 11.05, "30b": 17.89},
    "activation": {"8b": 6.26, "30b": 6.09},
    "deactivation": {"8b": 3.18, "30b": 4.38},
}
