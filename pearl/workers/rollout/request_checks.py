"""Why an engine does not take a request: one bad id would otherwise end an iteration shared with others."""

from pearl.workers.rollout.protocol import GenerateRequest, Role


def invalid_reason(request: GenerateRequest, vocabulary_size: int) -> str:
    """Why nobody could serve it; "" = it can be served."""
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
    return ""


def role_mismatch(request: GenerateRequest, role: Role) -> str:
    """Why a worker of this role cannot take it; "" = it can."""
    if role == "colocated" and request.pair:
        return "this worker is colocated and takes whole requests only"
    if role != "colocated" and not request.pair:
        return f"this worker is a {role} worker and takes stages of a pair only"
    return ""
