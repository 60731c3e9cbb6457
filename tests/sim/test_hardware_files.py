"""Hardware profiles: the same however they were saved, and refused with file, line and key when something is wrong."""

from pathlib import Path

import pytest

from pearl.config import ConfigError
from pearl.sim import hardware

SHIPPED = (hardware.SHIPPED / "h800-qwen3-8b.toml").read_text(encoding="utf-8")


def load(tmp_path: Path, content: bytes) -> hardware.Hardware:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    return hardware.load(str(path))


def changed(line: str) -> bytes:
    """The shipped profile with one of its lines as given; its key says which."""
    key = line.partition("=")[0]
    lines = [line if old.startswith(key) else old for old in SHIPPED.splitlines()]
    assert line in lines
    return "\n".join(lines).encode()


@pytest.mark.parametrize("name", hardware.shipped_names())
def test_every_shipped_profile_is_read_and_gives_its_sources(name: str) -> None:
    assert hardware.load(name).sources


def test_a_profile_is_the_same_however_it_was_saved(tmp_path: Path) -> None:
    plain = SHIPPED.encode()
    crlf = SHIPPED.replace("\n", "\r\n").encode()
    bom = b"\xef\xbb\xbf"
    for content in (plain, bom + plain, crlf, bom + crlf, plain.rstrip(b"\n"), plain + b"\n\n"):
        assert load(tmp_path, content) == hardware.load("h800-qwen3-8b")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "missing required field `name`"),
        (b"# nothing\r\n", "missing required field `name`"),
        (changed("gpus = 0"), r"line \d+: worker.gpus = 0: must be greater than 0"),
        (changed("gpus = 2.5"), "Expected `int`, got `float` - at `\\$.worker.gpus`"),
        (changed("preparation = -1.0"), r"line \d+: costs.preparation = -1.0: must be at least 0"),
        (changed("preparation = nan"), "costs.preparation = nan: must be at least 0 and finite"),
        (changed("preparation = inf"), "costs.preparation = inf"),
        (changed("kv_bandwidth_bytes_per_s = 0.0"), "kv_bandwidth_bytes_per_s = 0: must be greater than 0"),
        (SHIPPED.encode() + b"\n[worker]\ngpus = 2\n", "at line"),
        (SHIPPED.replace("gpus = 2", "gpus = 2\ngpus = 2").encode(), "at line"),
        (SHIPPED.replace("[costs]", "[cost]").encode(), "cost"),
        (SHIPPED.replace("[costs]", "[costs").encode(), "at line"),
        (SHIPPED.replace("preparation =", "preparations =").encode(), "preparations"),
        (SHIPPED.encode("utf-16"), "is no hardware profile"),
        (b"#" * (2 << 20), "is larger than 1024 KiB"),
    ],
)
def test_broken_profiles_are_refused_with_the_reason(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(tmp_path, content)
    assert str(caught.value).startswith(str(tmp_path / "mine.toml"))


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no profile"):
        hardware.load(str(tmp_path / "absent.toml"))
