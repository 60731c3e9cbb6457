"""Texts of errors: whatever foreign code raises can be sent, stored and read."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.types.error_text import error_text, escaped, without_surrogates
from pearl.types.messages.environment import EpisodeFailed, OpenEpisode


class Unprintable(Exception):
    def __init__(self, raised: BaseException) -> None:
        super().__init__()
        self._raised = raised

    def __str__(self) -> str:
        raise self._raised


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("plain text, é and 猫"), "plain text, é and 猫"),
        (ValueError("two\n\tlines"), "two\n\tlines"),
        (ValueError("half a pair: \ud83d"), r"half a pair: \ud83d"),
        (ValueError("a\0b\x1b[2Jc"), r"a\x00b\x1b[2Jc"),
        (Unprintable(ValueError()), "<its text cannot be had: ValueError>"),
        (Unprintable(SystemExit()), "<its text cannot be had: SystemExit>"),
        (Unprintable(RecursionError()), "<its text cannot be had: RecursionError>"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            "'utf-8' codec can't decode byte 0xff in position 0: bad",
        ),
    ],
)
def test_the_text_of_an_error_is_printable(error: Exception, text: str) -> None:
    assert error_text(error) == text


def test_a_huge_text_is_cut() -> None:
    assert len(error_text(ValueError("x" * 10_000_000))) == 2000
    assert len(error_text(ValueError("\0" * 10_000_000), 50)) == 50


@given(st.text(st.characters(), max_size=100))
def test_any_text_can_be_encoded(text: str) -> None:
    escaped(text).encode()
    without_surrogates(text).encode()


def test_surrogates_are_escaped_in_every_part_of_a_message_and_nothing_else_changes() -> None:
    assert without_surrogates(EpisodeFailed("error", "a\ud800")) == EpisodeFailed("error", r"a\ud800")
    message = OpenEpisode(1, "train", 2, (b"\xff",), (b"",))
    assert without_surrogates(message) == message
    nested = {"k\udc80": [("x\udc80", 1.5, None, True)]}
    assert without_surrogates(nested) == {r"k\udc80": [(r"x\udc80", 1.5, None, True)]}
    assert msgspec.json.encode(without_surrogates(nested))
