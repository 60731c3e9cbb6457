"""The bug-fix environment's rules by hand, its tasks, and its expert."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.envs.bugfix import BugfixEnvironment, actions, tokenizer
from pearl.envs.bugfix.episode import Repair
from pearl.envs.bugfix.expert import ExpertMix, demonstrate
from pearl.envs.bugfix.task import NUM_EVALUATION_TASKS, Shape, Task, make_task, split_of
from pearl.envs.bugfix.tokenizer import decode, encode

SHAPE = Shape(num_lines=4, num_symbols=10)
TASK = Task(broken=(0, 1, 2, 3), line=2, needed=5)


def play(*said: str) -> list[tuple[str, float, bool]]:
    repair = Repair(TASK, SHAPE)
    seen = [repair.act(encode(action)) for action in said]
    return [(decode(one.ids), one.reward, one.done) for one in seen]


def answer(action: str) -> str:
    return play(action)[0][0]


def test_the_prompt_shows_the_program_but_not_the_bug() -> None:
    assert decode(Repair(TASK, SHAPE).prompt()) == "<task> a b c d <agent>"


def test_test_view_edit_submit_repairs_it() -> None:
    assert play("TEST <end>", "VIEW L3 <end>", "EDIT L3 f <end>", "TEST <end>", "SUBMIT <end>") == [
        ("<tool> fail L3 <agent>", 0.0, False),
        ("<tool> needs f <agent>", 0.0, False),
        ("<tool> done <agent>", 0.0, False),
        ("<tool> pass <agent>", 0.0, False),
        ("", 1.0, True),
    ]


def test_only_a_submitted_right_program_is_rewarded() -> None:
    assert play("SUBMIT <end>") == [("", 0.0, True)]
    assert play("EDIT L3 g <end>", "SUBMIT <end>")[-1] == ("", 0.0, True)
    assert play("EDIT L3 f <end>", "EDIT L1 b <end>", "SUBMIT <end>")[-1] == ("", 0.0, True)
    assert play("EDIT L3 f <end>")[-1][1] == 0.0
    assert play("EDIT L3 f <end>", "SUBMIT <end>")[-1] == ("", 1.0, True)


def test_a_spoilt_line_fails_first() -> None:
    assert play("EDIT L1 b <end>", "TEST <end>")[-1][0] == "<tool> fail L1 <agent>"
    assert answer("VIEW L1 <end>") == "<tool> needs a <agent>"


@pytest.mark.parametrize(
    "action",
    [
        "",
        "<end>",
        "TEST",
        "TEST L1 <end>",
        "VIEW <end>",
        "VIEW L5 <end>",
        "VIEW a <end>",
        "EDIT L3 <end>",
        "EDIT L3 f",
        "EDIT f L3 <end>",
        "EDIT L3 k <end>",
        "SUBMIT",
        "<pad> SUBMIT <end>",
        "SUBMIT <end> <end>",
    ],
)
def test_anything_else_is_an_error_and_changes_nothing(action: str) -> None:
    assert play(action, "EDIT L3 f <end>", "SUBMIT <end>")[0] == ("<tool> error <agent>", 0.0, False)
    assert play(action, "EDIT L3 f <end>", "SUBMIT <end>")[-1][1] == 1.0


def test_nothing_follows_submit() -> None:
    repair = Repair(TASK, SHAPE)
    repair.act(encode("SUBMIT <end>"))
    with pytest.raises(ValueError, match="has ended"):
        repair.act(encode("TEST <end>"))


def test_actions_are_at_most_four_tokens_and_are_read_back() -> None:
    for action in (actions.Test(), actions.View(3), actions.Edit(3, 9), actions.Submit()):
        ids = actions.render(action)
        assert actions.parse(ids, SHAPE) == action
        assert len(ids) <= 4


# tokenizer


def test_there_are_32_different_words() -> None:
    assert len(tokenizer.WORDS) == len(set(tokenizer.WORDS)) == 32
    assert tokenizer.WORDS[tokenizer.END] == "<end>"
    assert tokenizer.WORDS[tokenizer.ERROR] == "error"
    assert tokenizer.WORDS[tokenizer.SUBMIT] == "SUBMIT"


@given(st.lists(st.integers(0, 31)))
def test_ids_survive_the_way_through_text(ids: list[int]) -> None:
    assert encode(decode(ids)) == ids


def test_what_is_no_word_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="VIEWS"):
        encode("VIEWS L1")
    with pytest.raises(ValueError, match="32"):
        decode([32])


# tasks


def test_a_task_is_the_same_each_time() -> None:
    assert make_task(SHAPE, "train", 12345) == make_task(SHAPE, "train", 12345)
    assert make_task(SHAPE, "train", 0) == Task(broken=(5, 6, 0, 8), line=1, needed=7)


def test_no_evaluation_task_is_a_train_task() -> None:
    train = {make_task(SHAPE, "train", index) for index in range(3000)}
    evaluation = {make_task(SHAPE, "evaluation", index) for index in range(1000)}
    assert not train & evaluation
    assert {split_of(task) for task in train} == {"train"}
    assert {split_of(task) for task in evaluation} == {"evaluation"}
    assert len(evaluation) > 950
    assert len(train) > 2900


def test_every_task_has_a_bug() -> None:
    for index in range(200):
        task = make_task(SHAPE, "train", index)
        assert task.broken != task.fixed
        assert sum(has != needs for has, needs in zip(task.broken, task.fixed, strict=True)) == 1


def test_tasks_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="no evaluation task"):
        make_task(SHAPE, "evaluation", NUM_EVALUATION_TASKS)
    with pytest.raises(ValueError, match="no train task -1"):
        make_task(SHAPE, "train", -1)


@pytest.mark.parametrize(
    ("option", "value"), [("num_lines", 7), ("num_symbols", 2), ("look_ratio", 1.5), ("look_weight", -1.0)]
)
def test_options_out_of_range_are_refused_with_their_key(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"environment.options.{option} = {value}"):
        BugfixEnvironment(**{option: value})  # type: ignore[arg-type]


def test_small_shapes_have_both_splits() -> None:
    environment = BugfixEnvironment(num_lines=1, num_symbols=3)
    environment.episode("train", 5)
    environment.episode("evaluation", 5)


# the environment


async def test_restore_by_replaying_the_same_actions() -> None:
    environment = BugfixEnvironment()
    first, second = environment.episode("train", 7), environment.episode("train", 7)
    assert await first.reset() == await second.reset()
    for action in ("TEST <end>", "nothing", "VIEW L2 <end>", "EDIT L2 a <end>", "TEST <end>", "SUBMIT <end>"):
        ids = [] if action == "nothing" else encode(action)
        assert await first.step(ids, not ids) == await second.step(ids, not ids)


def test_the_description_matches_the_tokenizer() -> None:
    spec = BugfixEnvironment().describe()
    assert (spec.vocabulary_size, spec.stop_ids, spec.pad_id) == (32, (tokenizer.END,), tokenizer.PAD)
    assert (spec.num_train_tasks, spec.can_restore) == (0, True)
    assert spec.num_evaluation_tasks >= 1000


# the expert


def test_an_expert_that_looks_always_repairs_it() -> None:
    assert all(demonstrate(SHAPE, ExpertMix(1.0, 1.0), 0, index)[2] == 1.0 for index in range(200))


def test_an_expert_that_does_not_look_guesses() -> None:
    rewards = [demonstrate(SHAPE, ExpertMix(0.0, 1.0), 0, index)[2] for index in range(900)]
    assert 60 < sum(rewards) < 140  # a ninth of them are right


def test_looking_has_little_weight_and_what_is_read_has_none() -> None:
    ids, weights, _ = demonstrate(SHAPE, ExpertMix(1.0, 0.25), 0, 0)
    text = decode(ids).split()
    assert len(ids) == len(weights)
    view = text.index("VIEW")
    assert weights[view : view + 3] == [0.25] * 3
    edit = text.index("EDIT")
    assert weights[edit : edit + 4] == [1.0] * 4
    first_turn = text.index("TEST")
    assert weights[:first_turn] == [0.0] * first_turn
    assert sum(weights) == 2 + 3 * 0.25 + 4 + 2  # TEST, VIEW, EDIT, SUBMIT
    assert text[-2:] == ["SUBMIT", "<end>"]


def test_demonstrations_do_not_depend_on_how_they_are_asked_for() -> None:
    environment = BugfixEnvironment()
    whole = environment.demonstrations(3, 10, 20)
    assert whole == environment.demonstrations(3, 10, 5) + environment.demonstrations(3, 15, 15)
    assert whole != environment.demonstrations(4, 10, 20)
    looking = sum(tokenizer.VIEW in ids for ids, _ in environment.demonstrations(0, 0, 1000))
    assert 540 < looking < 660
