"""The architectures at a size for tests, as config.json has them."""

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "vocab_size": 97,
    "intermediate_size": 48,
    "initializer_range": 0.3,  # far from zero, so that nothing agrees by being nothing
}

LOGITS = {"fuse_cross_entropy": False}  # else there are none beside the loss

LINEAR = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "intermediate_size": 48,
    "initializer_range": 0.05,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

SMALL = {
    "delta_net": {"model_type": "delta_net", **COMMON},
    "delta_net_gate": {"model_type": "delta_net", "use_gate": True, **COMMON},
    "delta_net_tied": {"model_type": "delta_net", "tie_word_embeddings": True, **COMMON},
    "shared_head": {"model_type": "delta_net_shared_conv", "conv_sharing": "head", **COMMON},
    "shared_all": {"model_type": "delta_net_shared_conv", "conv_sharing": "all", **COMMON},
    "gated": {"model_type": "gated_deltanet", "head_dim": 16, "expand_v": 1.5, **COMMON},
    "gated_no_gate": {
        "model_type": "gated_deltanet", "head_dim": 16, "expand_v": 1.0, "use_gate": False, **COMMON
    },
    "gated_value_heads": {
        "model_type": "gated_deltanet", "head_dim": 8, "expand_v": 2.0, "num_v_heads": 4, **COMMON
    },
    "kda": {"model_type": "kda", "head_dim": 16, "expand_v": 1.5, **COMMON, **LOGITS},
    "kda_value_heads": {
        "model_type": "kda", "head_dim": 8, "expand_v": 2.0, "num_v_heads": 4, "safe_gate": True,
        "lower_bound": -5.0, **COMMON, **LOGITS
    },
    "qwen3_next": {"model_type": "qwen3_next", **LINEAR, **EXPERTS},
    "qwen3_5": {"model_type": "qwen3_5_text", **LINEAR, "linear_num_value_heads": 2},
    "qwen3_5_tied": {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **LINEAR},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **LINEAR, **EXPERTS},
    "olmo_hybrid": {"model_type": "olmo_hybrid", "num_key_value_heads": 2, "pad_token_id": None,
                    "eos_token_id": None, **LINEAR},
}  # fmt: skip


def change_channels(tensors, kind, shape, keys, values=None):
    """All tensors of a model by name, those over channels changed."""
    from statecut.pruning.slicing import Slicer

    unpruned = dict(tensors)
    slicer = Slicer(kind, shape, keys, values, unpruned.__getitem__)
    return {name: slicer(name, tensor).to(tensor.dtype) for name, tensor in unpruned.items()}
