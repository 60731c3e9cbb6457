"""Which requests an SGLang engine takes. Pure."""

from pearl.workers.rollout.protocol import GenerateRequest, Role
from pearl.workers.rollout.sglang.settings import SglangSettings


def refusal(request: GenerateRequest, vocabulary_size: int, settings: SglangSettings) -> str:
    """Why it cannot be served at all; "" = it can. SGLang is never asked: some of it would end its scheduler."""
    params = request.params
    if len(request.ids) == 0:
        return "the context is empty; give at least one token id"
    lowest, highest = int(request.ids.min()), int(request.ids.max())
    if lowest < 0 or highest >= vocabulary_size:
        bad = lowest if lowest < 0 else highest
        return f"token id {bad} is not in the model's vocabulary of {vocabulary_size}"
    if params.max_new_tokens < 0:
        return f"max_new_tokens = {params.max_new_tokens}; it must not be negative"
    if not 0.0 <= params.temperature < float("inf"):
        return f"temperature = {params.temperature}; it must be finite and not negative"
    total = len(request.ids) + params.max_new_tokens
    if total > settings.kv_capacity_tokens:
        return (
            f"{total} tokens of context and answer never fit into {settings.kv_capacity_tokens} tokens of KV"
        )
    if total > settings.max_context_tokens:
        return (
            f"{total} tokens of context and answer are more than rollout.max_context_tokens = "
            f"{settings.max_context_tokens}"
        )
    return ""


def misfit(request: GenerateRequest, role: Role) -> str:
    """Why a worker of this role cannot take the request; "" = it can."""
    if role == "colocated" and request.pair:
        return "this worker is colocated and takes whole requests only"
    if role != "colocated" and not request.pair:
        return f"this worker is a {role} worker and takes halves of a pair only"
    return ""
