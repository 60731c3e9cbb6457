"""A trajectory's row: what a delta adds to it, and the line that it leaves behind."""

from pearl.core.pipeline.trajectory import Trajectory
from pearl.types.ids import AttemptId, PromptId, Slot, TrajectoryId
from pearl.types.trajectory import Outcome, TokenDelta, Turn, VersionRun
from pearl.types.weights import Version

OLD, NEW = Version(0, 1), Version(0, 2)


def make() -> Trajectory:
    return Trajectory(TrajectoryId(7), PromptId(2), 1, 0, tokens=5, turns=[Turn(5)])


def delta(version: Version, count: int, prefilled: int = 0) -> TokenDelta:
    return TokenDelta(AttemptId(1), count, (VersionRun(version, count, OLD),), prefilled)


def test_deltas_add_up_and_runs_of_one_version_merge() -> None:
    one = make()
    for each in (delta(OLD, 2, 5), delta(OLD, 3), delta(NEW, 1)):
        one.add_delta(each, Slot(4))
    turn = one.turns[0]
    assert (one.tokens, one.generated_tokens, turn.prefilled_tokens, turn.worker) == (11, 6, 5, 4)
    assert turn.versions == [VersionRun(OLD, 5, OLD), VersionRun(NEW, 1, OLD)]
    assert (one.start_version, one.end_version, one.versions()) == (OLD, NEW, {OLD, NEW})


def test_a_delta_without_tokens_counts_only_what_was_prefilled() -> None:
    one = make()
    one.add_delta(TokenDelta(AttemptId(1), 0, (), 5, "abort"), Slot(4))
    assert (one.tokens, one.turns[0].prefilled_tokens) == (5, 5)
    assert (one.turns[0].worker, one.start_version) == (None, None)


def test_prefilling_more_than_was_new_is_counted_as_done_again() -> None:
    assert Turn(5, prefilled_tokens=5).reprefilled_tokens == 0
    assert Turn(5, prefilled_tokens=12).reprefilled_tokens == 7
    assert Turn(5, prefilled_tokens=2).reprefilled_tokens == 0, "the rest was cached"


def test_the_turn_counts_from_the_first_prompt() -> None:
    assert Trajectory(TrajectoryId(7), PromptId(2), 1, 0).turn == -1
    assert make().turn == 0


def test_the_line_of_a_trained_and_of_a_discarded_trajectory() -> None:
    one = make()
    one.outcome, one.trained_step, one.reward = Outcome.DONE, 1, 0.5
    kept, discarded = one.record(3), one.record(3, "lineage")
    assert (kept.outcome, kept.trained_step, kept.discarded, kept.lineage) == ("done", 1, "", 3)
    assert (discarded.outcome, discarded.trained_step, discarded.discarded) == ("done", None, "lineage")
    one.outcome = None
    assert one.record(3, "ended early").outcome == "discarded"


def test_only_what_failed_or_expired_is_masked() -> None:
    masked = {outcome for outcome in Outcome if outcome.is_masked}
    assert masked == {Outcome.EXPIRED, Outcome.INFRASTRUCTURE}
