"""Which requests an SGLang engine takes. Pure."""

from pearl.workers.rollout import request_checks
from pearl.workers.rollout.protocol import GenerateRequest
from pearl.workers.rollout.sglang.settings import SglangSettings


def invalid_reason(request: GenerateRequest, vocabulary_size: int, settings: SglangSettings) -> str:
    """Why it cannot be served at all; "" = it can. SGLang is never asked: some of it would end its scheduler."""
    if error := request_checks.invalid_reason(request, vocabulary_size):
        return error
    total = len(request.ids) + request.params.max_new_tokens
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
