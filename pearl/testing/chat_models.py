"""Model directories with a small tokenizer and the chat template of a family, as text environments read them."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pearl.envs.protocol import EpisodeLimits
from pearl.envs.text.options import ChatOptions, ProvenChat, make_chat

CORPUS = [
    "Question Answer probe quartz Result you can call these functions given as JSON name arguments parameters",
    "user assistant system tool the quick brown fox jumps over the lazy dog 0123456789 {}[]\":,' def return",
] * 3
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools %}{{ 'Functions: ' + (tools | tojson) + '\\n\\n' }}{% endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
THINKING = """{%- set turns = namespace(last=0) %}
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages if message.role == 'user' %}{% set turns.last = messages.index(message) %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and loop.index0 > turns.last %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- ('' if loop.first else '\\n') + '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Like Qwen3's: what was thought before the last user's message is dropped."""
PLAIN = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Knows no tools, as many small models' templates."""

FAMILIES: dict[str, tuple[str, str, list[str]]] = {
    "hermes": ("", "<|im_end|>", ["<|im_start|>"]),
    "llama3": (LLAMA3, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": (
        MISTRAL,
        "</s>",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"],
    ),
    "thinking": (THINKING, "<|im_end|>", ["<|im_start|>"]),
    "plain": (PLAIN, "<|im_end|>", ["<|im_start|>"]),
}
"""Template ("" = the shipped one), end of a turn, further special tokens."""
LIMITS = EpisodeLimits(
    max_turns=100, max_context_tokens=1 << 20, max_new_tokens_per_turn=64, max_observation_tokens=4096
)


def make_directory(directory: Path, family: str) -> Path:
    """A directory with tokenizer.json, its settings and a chat template."""
    template, end, others = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", end, *others],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_call>", "</tool_call>")])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": end},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def make_proven(directory: Path, family: str, **options: str | bool) -> ProvenChat:
    make_directory(directory, family)
    if not FAMILIES[family][0]:
        options.setdefault("template", "chatml-tools")
    chosen = ChatOptions(**options)  # type: ignore[arg-type]
    return make_chat(chosen, str(directory))


def some_text(draws: random.Random, num_words: int) -> str:
    words = [
        "fix",
        "the",
        "bug",
        "café",
        "→",
        "日本",
        "'it's'",
        "{x}",
        "a_b",
        "\n",
        "  ",
        "1.5e3",
        "\\n",
        '"q"',
    ]
    return " ".join(draws.choice(words) for _ in range(num_words)).strip() or "x"
