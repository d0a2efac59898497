"""The architectures at a size for tests, as config.json has them."""

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "vocab_size": 97,
    "intermediate_size": 48,
    "initializer_range": 0.3,  # far from zero, so that nothing agrees by being nothing
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
}  # fmt: skip
