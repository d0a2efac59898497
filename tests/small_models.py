"""The architectures at a size for tests, as config.json has them, and what tests do with them."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from reproduction.new_tokenizers import train_tokenizer
from statecut.models.architectures import ARCHITECTURES
from statecut.models.capture import mixers
from statecut.models.checkpoint import create, save
from statecut.pruning.slicing import Keep

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "vocab_size": 97,
    "intermediate_size": 48,
    "initializer_range": 0.3,  # far from zero, so that nothing agrees by being nothing
}

LOGITS = {"fuse_cross_entropy": False}  # else there are none beside the loss

SOFTMAX = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "intermediate_size": 48,
    "initializer_range": 0.05,
}
LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    **SOFTMAX,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
STREAMS = {  # of Qwen4-Exp: residual streams, embeddings of n-grams, and an indexer
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 16,
    "heads_per_ngram": 1,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "eos_token_id": 0,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
}
KDA = {  # with MLA and experts
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 97,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDTHS = {"linear_head_dim": 12, "linear_num_heads": 2, "linear_conv_kernel_dim": 4}
INDEXER = {
    "qk_rope_head_dim": 0,
    "q_lora_rank": 12,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 128,  # as many as any test has: no tokens are left out
    "index_kpool": 4,
    "n_routed_experts": 4,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

ALL = {
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
    "qwen4_exp": {"model_type": "qwen4_exp_text", **LINEAR, **EXPERTS, **STREAMS},
    "olmo_hybrid": {"model_type": "olmo_hybrid", "num_key_value_heads": 2, "pad_token_id": None,
                    "eos_token_id": None, **LINEAR},
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16, "mamba_head_dim": 12,
        "rescale_prenorm_residual": False, **SOFTMAX, "initializer_range": 0.3,
        # Shorter steps are clamped to that in prompts, and not in single tokens.
        "time_step_min": 1e-6, "time_step_floor": 0.01
    },
    "kimi_linear": {"model_type": "kimi_linear", **KDA, "num_experts": 4, "linear_attn_config": {
        "head_dim": 12, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 3],
        "full_attn_layers": [2]}},
    "glm5_next": {"model_type": "glm5_next_text", **KDA, **WIDTHS, **INDEXER},
    "bailing_hybrid": {"model_type": "bailing_hybrid", **KDA, "num_experts": 4, "head_dim": 12,
                       "short_conv_kernel_size": 4},
    "gated_tied": {"model_type": "gated_deltanet", "head_dim": 16, "expand_v": 1.5,
                   "tie_word_embeddings": True, "conv_bias": True,
                   "output_gate_activation": "sigmoid", **COMMON},
}  # fmt: skip
SMALL = {n: c for n, c in ALL.items() if not ARCHITECTURES[c["model_type"]].missing()}
"""Those that the installed transformers has; `test_checkpoint` skips the others by name."""
HYBRIDS = [
    name
    for name, config in SMALL.items()
    if ARCHITECTURES[config["model_type"]].library == "transformers"
]
WITH_EXPERTS = [name for name in SMALL if "moe_intermediate_size" in SMALL[name]]
SQUARE = [name for name in SMALL if ARCHITECTURES[SMALL[name]["model_type"]].square]
"""One width for keys and values."""


def small_model(config, dtype=torch.float32):
    """With norms and biases that are not all the same number."""
    model = create(config, seed=3, dtype=dtype)
    kind, _, modules = mixers(model)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for module in modules:
            weight = module.get_parameter(kind.norm)
            weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            for parameter, bias in module.named_parameters():
                if parameter.endswith("bias") and parameter != "dt_bias":
                    bias.copy_(torch.randn(bias.shape, generator=generator) / 4)
    return model


def save_stock(folder, model_type, config, **options):
    """A new model of transformers, as it saves it itself."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    torch.manual_seed(4)
    model = auto.from_config(AutoConfig.for_model(model_type, **config))
    model.save_pretrained(folder, **options)
    return folder


def widths(name, keys, values):
    """Of a cut: both those of the values where a model has one width."""
    return (values if name in SQUARE else keys), values


def some(shape, width, channels="value", seed=0):
    """So many channels of each head, in any order."""
    heads, full = shape.size(channels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(len(shape.layers), heads, full, generator=generator).argsort(-1)
    return Keep(order[..., :width])


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def rewritten(source, target, change=lambda tensors: None, **config):
    """A copy of a folder with its tensors and its config changed."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    change_config(target, **config)
    return target


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "others", "go")


def workplace(root, *names, **configs):
    """Text, a tokenizer of 270 tokens, and models that have it, in a folder."""
    texts = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 30)) for i in range(1, 1500)]
    (root / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    train_tokenizer(texts[:60], root / "tokenizer", vocabulary_size=270)
    for name, config in ({name: SMALL[name] for name in names} | configs).items():
        model = create({**config, "vocab_size": 270}, seed=1)
        save(model, root / name, tokenizer=root / "tokenizer")
    return root
