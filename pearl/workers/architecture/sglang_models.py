"""Which architectures an installed SGLang has a model for, read off its sources: importing it takes many seconds."""

import ast
import subprocess
from pathlib import Path

LOCATE_LIMIT_S = 30.0
CODE = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"


def served_architectures(python: str) -> frozenset[str]:
    """Names of model classes, as ``config.architectures`` has them. OSError when that SGLang cannot be found."""
    try:
        found = subprocess.run(
            [python, "-c", CODE], capture_output=True, text=True, check=True, timeout=LOCATE_LIMIT_S
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"no SGLang was found for {python}") from error
    models = Path(found.stdout.strip()) / "srt" / "models"
    return frozenset(name for path in models.glob("*.py") for name in _entry_classes(path))


def _entry_classes(path: Path) -> list[str]:
    """``EntryClass = A`` or ``EntryClass = [A, B]`` at the top level is how a module names its models."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "EntryClass" for target in node.targets
        ):
            value = node.value
            parts = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
            return [part.id for part in parts if isinstance(part, ast.Name)]
    return []
