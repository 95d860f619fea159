"""What is known about fields of Hugging Face config.json files, as tables.

Sources: the configuration classes of transformers 5.23
(`src/transformers/models/<model_type>/configuration_<model_type>.py`), and for the names of fields
`vllm/config/model.py` of vLLM.
"""

from __future__ import annotations

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_SIZE = ("head_dim", "kv_channels", "hidden_size_per_head")

# Multimodal files hold the language model's part under one of these.
TEXT_PARTS = ("text_config", "llm_config", "language_config")

# Files of these types on the hub leave out what their class defaults to.
CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "qwen3": {"head_dim": 128},
}

# One layer in so many has full attention, the last of each run, where the file gives no layer_types
# and no sliding_window_pattern.
FULL_EVERY = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}

# A lone sliding_window means every layer for these, and nothing certain for others.
UNIFORM_WINDOW = frozenset({"ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"})

ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
STATE_LAYERS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding"}
)
# Fields that say so where there is no layer_types. A list counts if one entry is not attention.
STATE_FIELDS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "conv_L_cache",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_ssm",
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
ATTENTION_ENTRIES = ("attention", "full_attention", 1)

CHUNKED = "layers with chunked attention"
HYBRID = "hybrid state models"
SHARED = "layers that share another layer's KV"
UNEVEN = "layers with different heads"
UNSUPPORTED_FIELDS = {
    "block_configs": UNEVEN,
    "compress_ratios": "layers with compressed KV",
    "cross_attention_layers": "cross-attention layers",
    "global_head_dim": UNEVEN,
    "hybrid_layer_pattern": UNEVEN,
    "index_topk": "sparse-attention indexers with a cache of their own",
    "local_attention": "encoders with local attention",
    "num_kv_shared_layers": SHARED,
    "per_layer_config": UNEVEN,
    "swa_num_key_value_heads": UNEVEN,
    "use_cla": SHARED,
}
UNSUPPORTED_TYPES = {
    "gemma3n_text": SHARED,
    "gemma4_text": UNEVEN,
    "llama4_text": CHUNKED,
    "longcat_flash": "layers with two attention blocks",
    "minicpm3": "models that expand their latent before they cache it",
}
ROPE_FIELDS = (
    "alibi",
    "no_rope_layers",
    "no_rope_layer_interval",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_interleave",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "rotary_emb_base",
    "rotary_pct",
)
