"""Lending and expansion: in both directions, and back again."""

import msgspec
import pytest
from sample_profiles import shipped

from pearl.core.elastic.gate import ExpansionGate, GateState, LendingGate, best_seconds, ema
from pearl.types.config import ElasticConfig

CONFIG = ElasticConfig(
    borrow="gated", makespan="closed-form", activation_prior_s=1.0, return_prior_s=1.0, smoothing=0.5
)
QWEN3_8B = shipped("qwen3-8b")
DEDICATED, FULL = 4, 8
GAIN_S = best_seconds(QWEN3_8B, DEDICATED, CONFIG) - best_seconds(QWEN3_8B, FULL, CONFIG)


def lending() -> LendingGate:
    return LendingGate(GateState(), CONFIG)


def ask(gate: LendingGate, remaining: int = 64) -> bool:
    return gate.should_borrow(remaining, 64, QWEN3_8B, DEDICATED, FULL).yes


def measured(gate: LendingGate, toggle_s: float) -> None:
    gate.on_activated(toggle_s / 2)
    gate.on_returned(toggle_s / 2)


# Eq. 7


def test_eq_7_by_hand() -> None:
    gate = lending()
    measured(gate, 10.0)
    decision = gate.should_borrow(16, 64, QWEN3_8B, DEDICATED, FULL)
    assert decision.gain_s == pytest.approx(GAIN_S / 4)
    assert decision.cost_s == pytest.approx(10.0)
    assert decision.yes


def test_it_borrows_where_it_pays_and_not_where_it_costs() -> None:
    cheap, dear = lending(), lending()
    measured(cheap, 0.9 * GAIN_S)
    measured(dear, 1.1 * GAIN_S)
    assert ask(cheap)
    assert not ask(dear)


def test_few_trajectories_left_are_not_worth_it() -> None:
    gate = lending()
    measured(gate, GAIN_S / 8)
    assert [ask(gate, remaining) for remaining in (64, 16, 9, 7, 1, 0)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_unknown_borrows() -> None:
    assert lending().should_borrow(1, 64, None, DEDICATED, FULL).yes
    assert lending().should_borrow(1, 64, QWEN3_8B, 0, FULL).yes
    assert ask(lending())


def test_nothing_to_lend_is_no() -> None:
    assert not lending().should_borrow(64, 64, None, 4, 4).yes
    assert not lending().should_borrow(64, 64, None, 0, 0).yes


# costs that are believed


def test_one_bad_measurement_does_not_shut_it_for_ever() -> None:
    gate = lending()
    measured(gate, 2.0)
    measured(gate, 6 * GAIN_S)  # the average is now above the gain
    refused = 0
    while not ask(gate):
        gate.on_step(500.0, None, borrowed=False, refused=True)
        refused += 1
    assert 0 < refused <= 4
    gate.on_step(500.0, None, borrowed=True, refused=False)
    measured(gate, 2.0)
    measured(gate, 2.0)
    assert ask(gate)


def test_tries_become_rare_where_borrowing_always_costs() -> None:
    gate = lending()
    borrowed = []
    for _ in range(200):
        if ask(gate):
            measured(gate, 3 * GAIN_S)
            gate.on_step(500.0, None, borrowed=True, refused=False)
            borrowed.append(True)
        else:
            gate.on_step(500.0, None, borrowed=False, refused=True)
            borrowed.append(False)
    assert sum(borrowed[:20]) <= 6
    assert 1 <= sum(borrowed[100:]) <= 4


def test_a_cost_below_the_prior_is_kept() -> None:
    gate = lending()
    measured(gate, 0.2)
    for _ in range(5):
        gate.on_step(1.0, None, borrowed=False, refused=True)
    assert gate.toggle_cost_s == pytest.approx(0.2)


# steps that tell what the model does not


def test_steps_that_gain_nothing_from_borrowing_end_it() -> None:
    """Training or the environment sets the pace: with borrowed GPUs a step takes as long as without."""
    gate = lending()
    measured(gate, GAIN_S / 10)
    dedicated, full = (best_seconds(QWEN3_8B, count, CONFIG) for count in (DEDICATED, FULL))
    for _ in range(4):
        gate.on_step(dedicated, dedicated, borrowed=False, refused=False)
        gate.on_step(dedicated, full, borrowed=True, refused=False)
    assert not ask(gate)


def test_a_model_that_is_wrong_by_a_factor_scales_the_gain() -> None:
    gate = lending()
    full = best_seconds(QWEN3_8B, FULL, CONFIG)
    gate.on_step(full / 2, full, borrowed=True, refused=False)
    decision = gate.should_borrow(64, 64, QWEN3_8B, DEDICATED, FULL)
    assert decision.gain_s == pytest.approx(GAIN_S / 2)


def test_the_state_survives_a_journal() -> None:
    gate = lending()
    measured(gate, 3.0)
    gate.on_step(1.0, 2.0, borrowed=True, refused=False)
    state = gate._state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=GateState) == state


# expansion


def expansion(preparation_s: float = 60.0, finalization_s: float = 20.0) -> ExpansionGate:
    gate = ExpansionGate(GateState(), CONFIG)
    gate.on_expanded(preparation_s, finalization_s)
    return gate


def test_expansion_pays_early_in_a_run_and_not_at_its_end() -> None:
    gate = expansion()
    share = 1 - best_seconds(QWEN3_8B, FULL, CONFIG) / best_seconds(QWEN3_8B, DEDICATED, CONFIG)
    early = gate.should_expand(1060.0, QWEN3_8B, DEDICATED, FULL)
    assert early.yes
    assert early.gain_s == pytest.approx(1000.0 * share)
    assert not gate.should_expand(70.0, QWEN3_8B, DEDICATED, FULL).yes
    assert not gate.should_expand(10.0, QWEN3_8B, DEDICATED, FULL).yes


def test_expansion_of_what_is_unknown_goes_ahead() -> None:
    gate = expansion()
    assert gate.should_expand(None, QWEN3_8B, DEDICATED, FULL).yes
    assert gate.should_expand(1.0, None, DEDICATED, FULL).yes
    assert gate.should_expand(1.0, QWEN3_8B, 0, FULL).yes
    assert not gate.should_expand(None, None, 4, 4).yes


def test_smoothing_begins_with_the_first_value() -> None:
    assert ema(None, 4.0, 0.25) == 4.0
    assert ema(4.0, 8.0, 0.25) == 5.0
