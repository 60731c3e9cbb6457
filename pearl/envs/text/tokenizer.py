"""A model directory's tokenizer without ``transformers``: text to ids, ids to text, and the special tokens' names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TextTokenizer:
    def __init__(self, tokenizer: Tokenizer, special: dict[str, str], eos_ids: Sequence[int] = ()) -> None:
        """``special`` are the names that chat templates use: bos_token, eos_token, pad_token and so on."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special = special
        self.vocabulary_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.special_ids = {
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        eos = self.id_of(special.get("eos_token", ""))
        self.eos_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_ids]))
        pad = self.id_of(special.get("pad_token", ""))
        self.pad_id = next((number for number in (pad, *self.eos_ids) if number is not None), 0)

    def encode(self, text: str) -> list[int]:
        """Names of special tokens in the text become those tokens; nothing is added around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """All of it, special tokens by their names; bytes that are no text become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def id_of(self, token: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def name_of(self, number: int) -> str:
        name: str | None = self._tokenizer.id_to_token(number)
        return name or ""


def load_tokenizer(directory: Path) -> TextTokenizer:
    """The tokenizer of a model directory.

    Raises:
        ValueError: the directory holds none that can be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{directory}: has no tokenizer.json, so there is no tokenizer for text; "
            "save the model's fast tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise ValueError(f"{path}: cannot be read as a tokenizer: {error}") from error
    settings = read_object(directory / "tokenizer_config.json")
    named = read_object(directory / "special_tokens_map.json") | settings
    special = {key: _content(value) for key, value in named.items() if key.endswith("_token") and value}
    generation = read_object(directory / "generation_config.json").get("eos_token_id", [])
    eos_ids = generation if isinstance(generation, list) else [generation]
    return TextTokenizer(tokenizer, special, [number for number in eos_ids if isinstance(number, int)])


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty when there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return content


def _content(value: object) -> str:
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)
