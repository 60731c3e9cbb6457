"""What people wrote is found by name; what is wrong with it is said with the setting, the value and the way out."""

from pathlib import Path

import pytest

from pearl.runtime.extensions import ExtensionError, describe_error, format_error, load_extension


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in; it is not on the path of modules before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    return tmp_path


def test_a_module_in_the_folder_that_the_command_runs_in_is_found(folder: Path) -> None:
    (folder / "mine_in_folder.py").write_text("def choose(): return 3\n")
    assert load_extension("rollout.router", "mine_in_folder:choose")() == 3


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("x = 1\n", "broken_a:thing", "broken_a has no thing; it defines no class and no function"),
        ("def thing(): pass\n", "broken_b:thin", "broken_b has no thin; it has thing"),
        ("import no_such_module\n", "broken_c:thing", "No module named 'no_such_module'"),
        ("x = 1 / 0\n", "broken_d:thing", "ZeroDivisionError: division by zero"),
        ("def thing(:\n", "broken_e:thing", "SyntaxError"),
        ("", "broken_f", 'your own: "package.module:Name"'),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_setting(
    folder: Path, text: str, name: str, said: str
) -> None:
    (folder / f"{name.partition(':')[0]}.py").write_text(text)
    with pytest.raises(ExtensionError, match=f'rollout.router = "{name}"') as refused:
        load_extension("rollout.router", name)
    assert said in str(refused.value)


def test_the_line_of_a_failed_import_is_the_person_s_own(folder: Path) -> None:
    (folder / "broken_line.py").write_text("\nimport json\njson.loads('{')\n")
    with pytest.raises(ExtensionError, match=r"broken_line.py:3\)"):
        load_extension("environment.name", "broken_line:thing")


def test_an_error_is_described_where_its_author_can_mend_it() -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        int("x" * 10_000)
    assert f"({__file__}:" in describe_error(raised.value)
    assert len(describe_error(raised.value)) < 1000
    assert format_error(raised.value).startswith("Traceback")
