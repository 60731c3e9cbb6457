"""Messages to ids and back: nothing that was said is ever made again, whatever the family of the template."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pearl.envs.protocol import EpisodeLimits, InfrastructureError
from pearl.envs.text.conversation import Conversation
from pearl.envs.text.messages import Message, MessageError, check_messages, is_same
from pearl.envs.text.options import ProvenChat, split_options
from pearl.envs.text.proof import TOOLS
from pearl.envs.text.template import ChatTemplate
from pearl.envs.text.tools import ToolFormat, parse_calls
from pearl.testing import chat_models as made

NUM_CONVERSATIONS = 1000


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProvenChat]:
    root = tmp_path_factory.mktemp("models")
    return {
        "hermes": made.make_proven(root / "hermes", "hermes"),
        "llama3": made.make_proven(root / "llama3", "llama3"),
        "mistral": made.make_proven(root / "mistral", "mistral", follow_ups="tools"),
    }


def test_a_thousand_conversations_of_three_families_do_not_drift(chats: dict[str, ProvenChat]) -> None:
    num_drifted = num_turns = 0
    for number in range(NUM_CONVERSATIONS):
        family = sorted(chats)[number % 3]
        draws = random.Random(f"drift/{number}")
        turns = draws.randrange(1, 5)
        num_turns += turns
        num_drifted += drifts(chats[family], family, draws, turns)
    assert num_turns > 2000
    assert num_drifted == 0


def drifts(proven: ProvenChat, family: str, draws: random.Random, turns: int) -> bool:
    """Whether the ids that were put together differ from those of the whole conversation, rendered at its end."""
    chat = proven.chat
    conversation = Conversation(proven, made.LIMITS)
    tools = list(TOOLS)
    messages: list[Message] = [{"role": "user", "content": made.some_text(draws, 6)}]
    ids = conversation.begin(messages, tools)
    for turn in range(turns):
        said, new = exchange(family, draws, turn)
        spoken = chat.template.render([*messages, said], tools, open_turn=False)
        body = spoken[len(chat.template.render(messages, tools, open_turn=True)) :]
        end = chat.tokenizer.name_of(chat.end_id)
        action = [*chat.tokenizer.encode(body[: body.rindex(end)]), chat.end_id]
        if draws.random() < 0.1:  # cut before its end token: the template's own is put there
            action.pop()
        answer = conversation.answer(action)
        assert is_same(answer.message, check_messages([said])[0])
        observed, fits = conversation.extend(new)
        assert fits
        ids += action + observed
        messages += [said, *new]
    assert conversation.num_tokens == len(ids)
    return ids != chat.prompt(messages, tools)


def exchange(family: str, draws: random.Random, turn: int) -> tuple[Message, list[Message]]:
    """What the assistant says, and what follows it."""
    if family != "mistral" and draws.random() < 0.4:
        said: Message = {"role": "assistant", "content": made.some_text(draws, 5)}
        return said, [{"role": "user", "content": made.some_text(draws, 4)}]
    count = 1 if family == "llama3" else draws.randrange(1, 4)
    calls: list[dict[str, Any]] = []
    for index in range(count):
        arguments = {"word": made.some_text(draws, 3), "depth": [draws.randrange(9), {"exact": True}]}
        function = {"name": "probe", "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"c{turn:05d}{index:03d}", "type": "function", "function": function})
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [
        {"role": "tool", "content": made.some_text(draws, 7), "tool_call_id": call["id"]} for call in calls
    ]
    return said, results


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_what_was_generated_stays_as_it_is_even_where_no_tokenizer_would_make_it(
    chats: dict[str, ProvenChat], family: str
) -> None:
    """Random ids: their text encodes to other ids, which must not matter."""
    chat = chats[family].chat
    draws = random.Random(family)
    for _ in range(20):
        conversation = Conversation(chats[family], made.LIMITS)
        first = conversation.begin([{"role": "user", "content": "Go."}], [])
        action = [draws.randrange(270, 390) for _ in range(12)]
        answer = conversation.answer([*action, chat.end_id])
        observed, _ = conversation.extend(
            [{"role": "user", "content": "And?"}] if family != "mistral" else RESULT
        )
        assert chat.tokenizer.decode(action) == chat.text_of([*action, chat.end_id])
        assert conversation.num_tokens == len(first) + len(action) + 1 + len(observed)
        assert chat.end_id not in observed[:1]
        assert answer.message["role"] == "assistant"


RESULT: list[Message] = [{"role": "tool", "content": "ok", "tool_call_id": "c00000000"}]


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_the_family_is_recognised_by_reading_back_what_the_template_writes(
    chats: dict[str, ProvenChat], family: ToolFormat
) -> None:
    assert chats[family].chat.tool_format == family


def test_a_template_without_tools_has_none_and_does_not_become_another(tmp_path: Path) -> None:
    assert made.make_proven(tmp_path, "plain").chat.tool_format == "none"
    with pytest.raises(ValueError, match=r"writes no tool calls.*chatml-tools"):
        made.make_proven(tmp_path, "plain", tool_format="hermes")
    assert made.make_proven(tmp_path, "plain", template="chatml-tools").chat.tool_format == "hermes"


def test_tools_that_the_model_would_not_see_are_refused(tmp_path: Path) -> None:
    conversation = Conversation(made.make_proven(tmp_path, "plain"), made.LIMITS)
    with pytest.raises(MessageError, match=r'does not show any.*template = "chatml-tools"'):
        conversation.begin([{"role": "user", "content": "Go."}], list(TOOLS))


def test_a_format_that_nothing_reads_back_is_refused_with_the_list(tmp_path: Path) -> None:
    odd = made.PLAIN.replace(
        "{{ message.content }}",
        "{{ message.content }}{% for c in message.tool_calls %}CALL {{ c }}{% endfor %}",
    )
    (tmp_path / "odd.jinja").write_text(odd)
    with pytest.raises(ValueError, match="name one of hermes, llama3, mistral, none"):
        made.make_proven(tmp_path / "model", "plain", template=str(tmp_path / "odd.jinja"))


def test_a_template_that_drops_thinking_is_refused_with_the_settings_that_help(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drops the thinking of earlier answers") as refused:
        made.make_proven(tmp_path, "thinking")
    for way in ('follow_ups = "tools"', "keep_thinking = true", 'template = "chatml-tools"'):
        assert f"environment.options.{way}" in str(refused.value)


def test_thinking_is_kept_when_asked(tmp_path: Path) -> None:
    proven = made.make_proven(tmp_path, "thinking", keep_thinking=True)
    conversation = Conversation(proven, made.LIMITS)
    conversation.begin([{"role": "user", "content": "Go."}], [])
    said = proven.chat.tokenizer.encode("<think>\nhm\n</think>\n\nDone.<|im_end|>")
    answer = conversation.answer(said)
    assert answer.message == {"role": "assistant", "content": "Done.", "reasoning_content": "hm"}
    ids, _ = conversation.extend([{"role": "user", "content": "And?"}])
    assert proven.chat.tokenizer.decode(ids) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_only_what_was_promised_may_follow(tmp_path: Path) -> None:
    proven = made.make_proven(tmp_path, "thinking", follow_ups="tools")
    conversation = Conversation(proven, made.LIMITS)
    conversation.begin([{"role": "user", "content": "Go."}], list(TOOLS))
    conversation.answer(proven.chat.tokenizer.encode("<think>\nhm\n</think>\n\nDone.<|im_end|>"))
    with pytest.raises(
        InfrastructureError, match=r"user after thinking: it drops the thinking.*docs/agents.md"
    ):
        conversation.extend([{"role": "user", "content": "And?"}])


def test_a_template_that_moves_what_was_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rewrites earlier messages.*follow_ups = \"tools\""):
        made.make_proven(tmp_path, "mistral")


def test_a_template_whose_turns_end_with_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(ValueError, match="does not end an assistant's turn with a special token"):
        made.make_proven(tmp_path / "model", "plain", template=str(tmp_path / "open.jinja"))


@pytest.mark.parametrize(
    ("form", "text", "failure"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "not closed"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {a}}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', '"name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("llama3", '{"name": "f", "parameters": {"a": 1}', "not valid JSON"),
        ("llama3", '{"name": "f", "parameters": 3}', "not a JSON object"),
        ("mistral", "[TOOL_CALLS] nothing", "not valid JSON"),
        ("mistral", "[TOOL_CALLS] []", "empty list"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_failure_and_keeps_its_text(
    form: ToolFormat, text: str, failure: str
) -> None:
    parsed = parse_calls(form, text)
    assert failure in parsed.failure
    assert (parsed.content, parsed.calls) == (text, ())


@pytest.mark.parametrize(
    ("form", "text", "content", "names"),
    [
        ("hermes", 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "I look.", ["f"]),
        ("hermes", "no call, <b>text</b>", "no call, <b>text</b>", []),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", ["f"]),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]c00000001[ARGS]{}', "", ["f", "g"]),
        ("none", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ],
)
def test_calls_are_read_from_text(form: ToolFormat, text: str, content: str, names: list[str]) -> None:
    parsed = parse_calls(form, text)
    assert (parsed.content, [call.name for call in parsed.calls], parsed.failure) == (content, names, "")


def test_half_a_surrogate_does_not_get_further(chats: dict[str, ProvenChat]) -> None:
    text = '<tool_call>{"name": "f\\ud800", "arguments": {"a": "\\udfff"}}</tool_call>'
    function = chats["hermes"].chat.read(text, 0).message["tool_calls"][0]["function"]
    assert function == {"name": "f\ufffd", "arguments": '{"a": "\ufffd"}'}
    assert check_messages([{"role": "user", "content": "\ud800"}])[0]["content"] == "\ufffd"


def test_a_long_observation_is_cut_in_its_content_and_keeps_the_template(
    chats: dict[str, ProvenChat],
) -> None:
    limits = EpisodeLimits(100, 4096, 64, 200)
    conversation = Conversation(chats["hermes"], limits)
    conversation.begin([{"role": "user", "content": "Go."}], [])
    conversation.answer([chats["hermes"].chat.end_id])
    ids, fits = conversation.extend([{"role": "tool", "content": "begin" + "0" * 100_000 + "end"}])
    text = chats["hermes"].chat.tokenizer.decode(ids)
    assert fits
    assert 100 < len(ids) <= 200
    assert text.startswith("\n<|im_start|>tool\nbegin0")
    assert "characters are cut here" in text
    assert text.endswith("0end<|im_end|>\n<|im_start|>assistant\n")


def test_what_does_not_fit_the_context_fills_it(chats: dict[str, ProvenChat]) -> None:
    limits = EpisodeLimits(100, 120, 64, 4096)
    conversation = Conversation(chats["hermes"], limits)
    conversation.begin([{"role": "user", "content": "Go."}], [])
    conversation.answer([chats["hermes"].chat.end_id])
    _, fits = conversation.extend([{"role": "tool", "content": "0" * 1000}])
    assert not fits
    assert conversation.num_tokens == 120


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role: 'robot'"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0]: a part of type 'image_url'",
        ),
        ({"role": "user", "content": 3}, "messages[0].content: int"),
        ({"role": "user", "tool_calls": [{}]}, "only the assistant calls tools"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "a function with a name"),
        ("text", "messages[0]: str"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message: object, wrong: str) -> None:
    with pytest.raises(MessageError) as refused:
        check_messages([message])
    assert wrong in str(refused.value)


def test_options_are_checked_and_divided() -> None:
    chat, rest = split_options({"follow_ups": "tools", "size": 3})
    assert (chat.follow_ups, rest) == ("tools", {"size": 3})
    with pytest.raises(ValueError, match=r"environment\.options.*keep_thinking"):
        split_options({"keep_thinking": "yes"})
    with pytest.raises(ValueError, match='tool_format = "qwen": is not one of hermes, llama3'):
        split_options({"tool_format": "qwen"})


def test_templates_render_as_transformers_renders_them(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for family in ("llama3", "mistral", "thinking"):
        directory = made.make_directory(tmp_path / family, family)
        theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>"
        )
        theirs.add_special_tokens({"eos_token": made.FAMILIES[family][1]})
        special = {"bos_token": "<s>", "eos_token": made.FAMILIES[family][1]}
        template = ChatTemplate(made.FAMILIES[family][0], special)
        function = {"name": "probe", "arguments": {"word": "é<'\"&>"}}
        messages: list[Message] = [
            {"role": "user", "content": "é <b>'q'</b>"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c00000000", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c00000000"},
        ]
        wanted = theirs.apply_chat_template(
            messages,
            tools=list(TOOLS),
            chat_template=made.FAMILIES[family][0],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert template.render(messages, TOOLS, open_turn=True) == wanted
