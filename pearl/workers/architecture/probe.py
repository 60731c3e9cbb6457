"""``python -m pearl.workers.architecture.probe``: the job's settings as JSON on stdin, what is wrong with its model as
JSON on stdout. No weight is loaded.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pearl.types.config import Config
from pearl.types.model_report import ModelReport
from pearl.workers.architecture.dtypes import ServedDtypes
from pearl.workers.architecture.sglang_models import served_architectures
from pearl.workers.architecture.survey import Survey, survey
from pearl.workers.architecture.weight_files import file_problems

NO_ENGINE = "no other engine helps: training asks the same of a model; docs/models.md lists what runs"
OTHER_ENGINE = 'the same model runs with rollout.engine = "torch"'


def examine(config: Config) -> ModelReport:
    """List what keeps the trainer and the chosen engine from running ``model.path``."""
    directory = Path(config.model.path)
    try:
        model_config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        return ModelReport("unknown architecture", (_first_sentence(error),))
    architecture = ", ".join(model_config.architectures or ()) or type(model_config).__name__
    problems = _config_problems(model_config, config)
    remedy = ""
    if not problems:
        found = survey(model_config, config.rollout.max_context_tokens)
        problems = [_shortened(problem) for problem in found.problems]
        remedy = NO_ENGINE if problems else ""
        problems += _dtype_problems(found, config)
    if not problems and config.rollout.engine == "sglang":
        problems = _sglang_problems(model_config, config)
        remedy = OTHER_ENGINE if problems else ""
    return ModelReport(architecture, (*problems, *file_problems(directory)), remedy)


def _config_problems(model_config: PreTrainedConfig, config: Config) -> list[str]:
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return [f"transformers has no causal language model for its model_type {model_config.model_type!r}"]
    if getattr(model_config, "quantization_config", None):
        return ["its weights are quantized, which cannot be trained: use the unquantized model"]
    limit, wanted = _max_positions(model_config.get_text_config()), config.rollout.max_context_tokens
    if limit and wanted > limit:
        return [f"it has {limit} positions; set rollout.max_context_tokens = {wanted} to at most that"]
    return []


def _max_positions(text_config: Any) -> int:
    """0 = not limited. A scaled rope reaches further than ``max_position_embeddings`` may say."""
    limit = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * (rope.get("factor") or 1.0)))
    return limit


def _dtype_problems(found: Survey, config: Config) -> list[str]:
    if found.model is None or found.problems:
        return []
    try:
        ServedDtypes(found.model, getattr(torch, config.model.dtype)).kept_modules(found.model)
    except ValueError as error:
        return [f'{error}; use model.dtype = "float32"']
    return []


def _sglang_problems(model_config: PreTrainedConfig, config: Config) -> list[str]:
    try:
        served = served_architectures(config.sglang.python or sys.executable)
    except OSError as error:
        return [str(error)]
    names = model_config.architectures or []
    if not served.intersection(names):
        return [f"SGLang has no model of its own for {', '.join(names) or 'it'}"]
    rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or 0
    if rope.get("rope_type") == "longrope" and config.rollout.max_context_tokens > original:
        return [
            f"SGLang changes its rope with the contexts of each batch that exceed {original} tokens; set "
            f"rollout.max_context_tokens to at most {original}"
        ]
    return []


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _shortened(lines[0])


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else text[:400] + " ..."


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    sys.stdout.buffer.write(msgspec.json.encode(examine(config)))


if __name__ == "__main__":
    main()
