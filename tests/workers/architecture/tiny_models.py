"""Tiny random models of the architectures people train, with weights large enough that attention decides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 150
"""Ids that are used; each model has PADDING rows more."""
PADDING = 10
WINDOW = 12
"""Shorter than the contexts of the tests, so that windows and chunks hide something."""
LAYERS = ["sliding_attention", "full_attention"]


def sizes(**changes: Any) -> dict[str, Any]:
    """What most configurations take; a change to None leaves a key away."""
    common = {
        "vocab_size": VOCABULARY + PADDING,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return {
        key: value for key, value in {**common, **changes}.items() if key in OPTIONAL or value is not None
    }


OPTIONAL = {"bos_token_id", "eos_token_id", "pad_token_id"}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
GPT: dict[str, Any] = {"vocab_size": VOCABULARY + PADDING, "n_embd": 32, "n_layer": 2, "n_head": 4}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
GEMMA_WINDOW: dict[str, Any] = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": LAYERS}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY + PADDING,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: t.LlamaConfig(**sizes()),
    "llama, rope llama3": lambda: t.LlamaConfig(
        **sizes(
            rope_parameters=rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        )
    ),
    "llama, rope yarn": lambda: t.LlamaConfig(
        **sizes(rope_parameters=rope("yarn", factor=8.0, original_max_position_embeddings=64))
    ),
    "llama, rope dynamic": lambda: t.LlamaConfig(
        **sizes(max_position_embeddings=32, rope_parameters=rope("dynamic", factor=2.0))
    ),
    "qwen2": lambda: t.Qwen2Config(**sizes(tie_word_embeddings=True)),
    "qwen2, sliding": lambda: t.Qwen2Config(
        **sizes(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(**sizes(**EXPERTS, shared_expert_intermediate_size=16)),
    "qwen3": lambda: t.Qwen3Config(**sizes(head_dim=8, tie_word_embeddings=True)),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**sizes(head_dim=8, **EXPERTS)),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **sizes(head_dim=8, **EXPERTS, **LINEAR, shared_expert_intermediate_size=16)
    ),
    "mistral": lambda: t.MistralConfig(**sizes(head_dim=8, sliding_window=WINDOW)),
    "ministral": lambda: t.MinistralConfig(**sizes(head_dim=8, sliding_window=WINDOW, layer_types=LAYERS)),
    "mixtral": lambda: t.MixtralConfig(**sizes(**LOCAL_EXPERTS)),
    "gemma": lambda: t.GemmaConfig(**sizes(head_dim=8)),
    "gemma2": lambda: t.Gemma2Config(
        **sizes(
            **GEMMA_WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
        )
    ),
    "gemma3_text": lambda: t.Gemma3TextConfig(**sizes(**GEMMA_WINDOW, query_pre_attn_scalar=8)),
    "gemma3": lambda: t.Gemma3Config(
        text_config=t.Gemma3TextConfig(**sizes(**GEMMA_WINDOW, query_pre_attn_scalar=8)).to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY + 1,
        boi_token_index=VOCABULARY + 2,
        eoi_token_index=VOCABULARY + 3,
    ),
    "gemma4_text": lambda: t.Gemma4TextConfig(
        **sizes(
            **GEMMA_WINDOW,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCABULARY + PADDING,
            num_kv_shared_layers=0,
        )
    ),
    "phi": lambda: t.PhiConfig(**sizes()),
    "phi3": lambda: t.Phi3Config(**sizes(sliding_window=WINDOW)),
    "phi3, longrope": lambda: t.Phi3Config(
        **sizes(
            original_max_position_embeddings=32,
            rope_parameters=rope(
                "longrope",
                short_factor=[1.0] * 4,
                long_factor=[4.0] * 4,
                original_max_position_embeddings=32,
            ),
        )
    ),
    "phimoe": lambda: t.PhimoeConfig(**sizes(**LOCAL_EXPERTS)),
    "gpt2": lambda: t.GPT2Config(**GPT, n_positions=512, bos_token_id=1, eos_token_id=2),
    "gptj": lambda: t.GPTJConfig(**GPT, n_positions=512, rotary_dim=8, bos_token_id=1, eos_token_id=2),
    "gpt_neox": lambda: t.GPTNeoXConfig(**sizes(num_key_value_heads=None)),
    "gpt_oss": lambda: t.GptOssConfig(
        **sizes(head_dim=8, **LOCAL_EXPERTS, sliding_window=WINDOW, layer_types=LAYERS)
    ),
    "opt": lambda: t.OPTConfig(
        **sizes(num_key_value_heads=None, intermediate_size=None, ffn_dim=48, word_embed_proj_dim=32)
    ),
    "bloom": lambda: t.BloomConfig(
        vocab_size=VOCABULARY + PADDING, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "falcon": lambda: t.FalconConfig(**sizes(num_key_value_heads=None, num_kv_heads=2)),
    "olmo": lambda: t.OlmoConfig(**sizes()),
    "olmo2": lambda: t.Olmo2Config(**sizes()),
    "olmo3": lambda: t.Olmo3Config(**sizes(sliding_window=WINDOW, layer_types=LAYERS)),
    "olmoe": lambda: t.OlmoeConfig(**sizes(num_experts=4, num_experts_per_tok=2)),
    "glm": lambda: t.GlmConfig(**sizes(head_dim=8)),
    "glm4": lambda: t.Glm4Config(**sizes(head_dim=8)),
    "glm4_moe": lambda: t.Glm4MoeConfig(**sizes(head_dim=8, **ROUTED)),
    "deepseek_v2": lambda: t.DeepseekV2Config(
        **sizes(**MLA, **{**ROUTED, "topk_method": "greedy"}, aux_loss_alpha=0.0)
    ),
    "deepseek_v3": lambda: t.DeepseekV3Config(**sizes(**MLA, **ROUTED)),
    "llama4_text": lambda: t.Llama4TextConfig(
        **sizes(
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=WINDOW,
            no_rope_layers=[1, 0],
            interleave_moe_layer_step=1,
            use_qk_norm=True,
        )
    ),
    "cohere": lambda: t.CohereConfig(**sizes(logit_scale=1.0)),
    "cohere2": lambda: t.Cohere2Config(**sizes(sliding_window=WINDOW, layer_types=LAYERS, logit_scale=1.0)),
    "granite": lambda: t.GraniteConfig(**sizes(logits_scaling=2.0, attention_multiplier=0.5)),
    "smollm3": lambda: t.SmolLM3Config(**sizes(no_rope_layers=[1, 0])),
    "starcoder2": lambda: t.Starcoder2Config(**sizes(sliding_window=WINDOW)),
    "stablelm": lambda: t.StableLmConfig(**sizes()),
    "exaone4": lambda: t.Exaone4Config(**sizes(sliding_window=WINDOW, layer_types=LAYERS)),
    "seed_oss": lambda: t.SeedOssConfig(**sizes(head_dim=8)),
    "ernie4_5": lambda: t.Ernie4_5Config(**sizes(head_dim=8)),
    "hunyuan_v1_dense": lambda: t.HunYuanDenseV1Config(**sizes(head_dim=8)),
    "minimax": lambda: t.MiniMaxConfig(
        **sizes(head_dim=8, **LOCAL_EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=8)
    ),
    "mamba": lambda: t.MambaConfig(**MAMBA),
    "jamba": lambda: t.JambaConfig(**sizes(num_experts=2, attn_layer_period=2, attn_layer_offset=1)),
    "recurrent_gemma": lambda: t.RecurrentGemmaConfig(**sizes(attention_window_size=WINDOW)),
    "falcon_h1": lambda: t.FalconH1Config(
        **sizes(head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8)
    ),
    "lfm2": lambda: t.Lfm2Config(**sizes(layer_types=["conv", "full_attention"], block_multiple_of=16)),
}

IN_EVERY_RUN = {
    "qwen2, sliding",
    "qwen3",
    "qwen3_moe",
    "llama, rope llama3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma4_text",
    "phi3, longrope",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "cohere2",
    "bloom",
    "qwen3_next",
    "lfm2",
    "llama, rope dynamic",
}
"""What each run of the tests tries; the rest is marked slow."""


def make_model(config: PreTrainedConfig, directory: Path) -> PreTrainedModel:
    """Save a model with random weights of such a size that attention is far from uniform."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(2.0)
            elif "embed" in name or "wte" in name or parameter is getattr(output, "weight", None):
                parameter.normal_(0, 0.5)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 1.6 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.tie_weights()
    model.save_pretrained(directory)
    return model
