"""Attention with all its scores in memory, for what the fused kernels lack: soft caps and sinks.

Letters: B batch, H query heads, K key-value heads, R = H / K, Q queries, L keys, D head size.
"""

import torch

from pearl.workers.architecture.arguments import Scoring


def attend(
    query_BHQD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    hidden: torch.Tensor,
    scale: float | None,
    scoring: Scoring,
) -> torch.Tensor:
    """[B, H, Q, D]; ``hidden`` (broadcasts over B, K, R, Q, L) is True where a key is not seen. Softmax in float32."""
    num_kv_heads = key_BKLD.shape[1]
    query = query_BHQD.view(len(query_BHQD), num_kv_heads, -1, *query_BHQD.shape[2:])  # [B, K, R, Q, D]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = (query @ key_BKLD[:, :, None].transpose(-1, -2)) * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores).view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:4], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1, dtype=torch.float32)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=torch.float32)
    return (weights.to(value_BKLD.dtype) @ value_BKLD[:, :, None]).flatten(1, 2)
