"""The table of docs/models.md: ``python tests/workers/architecture/models_page.py`` writes it anew."""

import json
from pathlib import Path
from typing import Any

from tiny_models import CONFIGS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pearl.workers.architecture.arguments import HONOURED
from pearl.workers.architecture.survey import Survey, survey

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
RECORD = json.loads((Path(__file__).parent / "sglang_outcomes.json").read_text("utf-8"))
HEAD = (
    f"| tried | class | torch engine and trainer | attention | SGLang {RECORD['sglang']}, CPU |\n"
    "|---|---|---|---|---|\n"
)
MEANINGS = {"softcap": "soft cap", "s_aux": "sinks"}


def table(max_context_tokens: int) -> str:
    rows = [_row(name, survey(make(), max_context_tokens)) for name, make in CONFIGS.items()]
    return HEAD + "".join(rows)


def _row(name: str, found: Survey) -> str:
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    architecture = mapping[type(CONFIGS[name]())].__name__
    if found.problems:
        return f"| {name} | `{architecture}` | refused: {found.problems[0]} | | |\n"
    masks = ", ".join(sorted({mask.kind for mask in found.masks.values()}))
    more = [MEANINGS[argument] for argument in HONOURED if argument in found.uses]
    served = RECORD["outcomes"].get(name, "not measured")
    return f"| {name} | `{architecture}` | runs | {', '.join([masks, *more])} | {served} |\n"


def with_table(page: str, content: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + content + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), table(96)), "utf-8")
