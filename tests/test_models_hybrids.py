"""transformers' hybrids of delta rules and softmax attention: cut, run and read back."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import (
    EXPERTS,
    HYBRIDS,
    LINEAR,
    SMALL,
    STREAMS,
    VISION,
    logits,
    rewritten,
    save_stock,
    some,
)
from training_runs import packed, recovery

from statecut.errors import InputError
from statecut.models.architectures import REFUSED, architecture
from statecut.models.architectures import linear_attention as hybrid
from statecut.models.capture import capture_rule_inputs, mixers
from statecut.models.checkpoint import Checkpoint, check_parameters, create, load, save
from statecut.pruning.refit import refit, write_refitted
from statecut.pruning.slicing import slice_model
from statecut.recovery import training
from statecut.recovery.checkpoints import Output

IDS = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(1))
MULTIMODAL = {
    "qwen3_5": {"text_config": {**LINEAR, "tie_word_embeddings": True},
                "vision_config": VISION, "tie_word_embeddings": True},
    "qwen3_5_moe": {"text_config": {**LINEAR, **EXPERTS}, "vision_config": VISION},
    "qwen4_exp": {"text_config": {**LINEAR, **EXPERTS, **STREAMS}, "vision_config": VISION},
}  # fmt: skip


@pytest.fixture(scope="module")
def visual(tmp_path_factory):
    """The multimodal ones as the hub has them, with a head that predicts tokens."""
    root = tmp_path_factory.mktemp("hybrids")
    for name, config in MULTIMODAL.items():
        text = save_stock(root / f"{name}_text", name, config)
        more = {"mtp.fc.weight": torch.randn(4, 4).bfloat16(), "mtp.norm.weight": torch.randn(4)}
        rewritten(text, root / name, lambda tensors, more=more: tensors.update(more))
        (root / name / "preprocessor_config.json").write_text("{}")
    return root


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_pruned_model_is_read_by_plain_transformers(visual, tmp_path, name):
    """And what is beyond the text model is copied as it is."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    checkpoint = Checkpoint(visual / name)
    keys, values = some(checkpoint.shape, 5, "key"), some(checkpoint.shape, 7)
    slice_model(checkpoint, keys, tmp_path / "cut", values=values)
    cut = Checkpoint(tmp_path / "cut")
    write_refitted(cut, refit(cut, checkpoint, IDS), tmp_path / "out")
    out = Checkpoint(tmp_path / "out")
    assert out.files == checkpoint.files
    assert len(checkpoint.passthrough) == 23
    for key, new in out.tensors():
        if key.startswith(("mtp.", "model.visual.")):
            old = checkpoint.tensor(key)
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        elif new.is_floating_point():
            assert new.dtype == torch.bfloat16
    assert out.config["text_config"] == {
        **checkpoint.config["text_config"], "linear_key_head_dim": 5, "linear_value_head_dim": 7,
        "rms_norm_eps": 1e-6 * (16 * 12 / (5 * 7)), "dtype": "bfloat16",
        # Not of Qwen4-Exp, whose softmax layers are "indexed_attention".
        **({} if name == "qwen4_exp" else {"full_attention_interval": 2}),
    }  # fmt: skip
    assert out.config["vision_config"] == checkpoint.config["vision_config"]
    assert (out.folder / "preprocessor_config.json").read_text() == "{}"
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model, report = auto.from_pretrained(out.folder, output_loading_info=True)
        assert not any(report.values()), report
        if auto is AutoModelForCausalLM:
            ours = load(out.folder, dtype=torch.bfloat16)
            assert torch.equal(logits(model.eval(), IDS), logits(ours, IDS))
            assert check_parameters(out)[0] == sum(p.numel() for p in model.parameters())


def test_a_recovered_model_keeps_what_is_beyond_the_text_model(visual, tmp_path):
    """And the names that its files have for it."""
    whole = Checkpoint(visual / "qwen3_5")
    slice_model(whole, some(whole.shape, 5, "key"), tmp_path / "cut")
    output = Output(tmp_path / "out", tmp_path / "running", links=True)
    data = packed(tmp_path / "tokens")
    training.recover(tmp_path / "cut", whole.folder, data, recovery(steps=2), output)
    cut, out = (Checkpoint(tmp_path / name) for name in ("cut", "out"))
    assert out.config == cut.config
    assert out.files == cut.files
    changed = {n for n, tensor in out.tensors() if not torch.equal(tensor, cut.tensor(n))}
    learned = r"model\.language_model\.layers\.[02]\.linear_attn\.(in_proj_qkv|conv1d)\.weight"
    assert len(changed) == 4
    assert all(re.fullmatch(learned, name) for name in changed)


def plain_queries_and_keys(model, index, x):
    """What the rule of a mixer receives for x (B, T, hidden), from its weights alone."""
    kind, shape, modules = mixers(model)
    mixer, keys = modules[index], shape.heads * shape.width
    if kind.model_type == "qwen3_next":
        blocks = mixer.in_proj_qkvz.weight.view(shape.heads, -1, x.shape[-1])
        q, k = blocks[:, : shape.width], blocks[:, shape.width : 2 * shape.width]
    elif kind.model_type == "nemotron_h":
        start = 2 * shape.value_heads * shape.value_width
        k, q = mixer.in_proj.weight[start : start + 2 * keys].split(keys)
    elif hasattr(mixer, "q_proj"):
        q, k = mixer.q_proj.weight, mixer.k_proj.weight
    else:
        q, k = mixer.in_proj_qkv.weight[:keys], mixer.in_proj_qkv.weight[keys : 2 * keys]
    weight = torch.cat([q.reshape(keys, -1), k.reshape(keys, -1)])
    filters, bias = mixer.conv1d.weight[: 2 * keys], None
    if kind.model_type == "nemotron_h":  # values come first, and keys before queries
        values = shape.value_heads * shape.value_width
        filters, bias = (
            torch.cat([part[values + keys :], part[values : values + keys]])
            for part in (mixer.conv1d.weight, mixer.conv1d.bias)
        )
    y = F.pad((x @ weight.mT).mT, (filters.shape[-1] - 1, 0))
    y = F.silu(F.conv1d(y, filters, bias, groups=2 * keys)).mT
    return [part.unflatten(-1, (shape.heads, -1)) for part in y.split(keys, -1)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_rule_is_shown_the_models_own_queries_and_keys(folders, name):
    model, inputs, received = load(folders / name), {}, {}
    with torch.no_grad(), capture_rule_inputs(model, received.__setitem__, inputs.__setitem__):
        model(IDS, use_cache=False)
        assert len(received) == 2
        for index, rule in received.items():
            expected = plain_queries_and_keys(model, index, inputs[index])
            for side, values in zip("qk", expected, strict=True):
                torch.testing.assert_close(rule[side], values, rtol=1e-5, atol=1e-6)


NEMOTRON_EXPERTS = {
    **SMALL["nemotron_h"],
    "layers_block_type": ["linear_attention", "full_attention", "moe"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}


@pytest.mark.parametrize("config", [SMALL["qwen3_5_moe"], NEMOTRON_EXPERTS])
@pytest.mark.parametrize("apart", [True, False])
def test_files_have_experts_apart_or_in_one_tensor(tmp_path, config, apart):
    model = create(config, seed=1).eval()
    model.save_pretrained(tmp_path / "model", save_original_format=apart)
    checkpoint = Checkpoint(tmp_path / "model")
    assert any(".experts.0." in name for name in checkpoint.files) == apart
    assert torch.equal(logits(load(tmp_path / "model"), IDS), logits(model, IDS))
    slice_model(checkpoint, some(checkpoint.shape, 5, "key"), tmp_path / "cut", dtype=None)
    assert logits(load(tmp_path / "cut"), IDS).isfinite().all()


def test_filters_of_olmo_in_thirds_are_refused_with_what_mends_them(folders, tmp_path):
    def cut_in_thirds(tensors):
        for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
            names = [name.replace("q_conv1d", f"{side}_conv1d") for side in "qkv"]
            thirds = torch.cat([tensors[n] for n in names]).tensor_split(3)
            tensors.update((n, third.clone()) for n, third in zip(names, thirds, strict=True))

    shape = Checkpoint(folders / "olmo_hybrid").shape
    tensors = load_file(folders / "olmo_hybrid" / "model.safetensors")
    rows = [len(tensors[f"model.layers.0.linear_attn.{side}_conv1d.weight"]) for side in "qkv"]
    assert rows == [shape.heads * shape.width] * 2 + [shape.value_heads * shape.value_width]
    folder = rewritten(folders / "olmo_hybrid", tmp_path / "thirds", cut_in_thirds)
    keys = some(shape, 5, "key")
    with pytest.raises(InputError, match=r"in thirds, whatever their widths: .*statecut\.save"):
        slice_model(Checkpoint(folder), keys, tmp_path / "cut")
    save(load(folder), tmp_path / "mended")  # as the message says
    slice_model(Checkpoint(tmp_path / "mended"), keys, tmp_path / "cut")


@given(every=st.integers(1, 5), layers=st.integers(1, 12), moved=st.booleans())
def test_a_cut_config_says_how_often_softmax_attention_comes(every, layers, moved):
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if moved:
        kinds.append("full_attention")
    config = {**SMALL["qwen3_5"], "num_hidden_layers": len(kinds), "layer_types": kinds}
    cut = architecture(config).resized(config, 8)
    assert (cut["layer_types"], cut["linear_key_head_dim"]) == (kinds, 8)
    if interval := cut.get("full_attention_interval"):
        del cut["layer_types"]
        again = hybrid.delta_layers(cut) if "linear_attention" in kinds else ()
        assert again == tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
        assert kinds[interval - 1] == "full_attention"
    else:
        assert "full_attention" not in kinds or (moved and (layers + 1) % every)


def test_what_a_config_leaves_out_is_as_in_transformers():
    config = {**SMALL["qwen3_5"], "num_hidden_layers": 8}
    del config["layer_types"]
    assert architecture(config).shape(config).layers == (0, 1, 2, 4, 5, 6)
    every_other = {**config, "full_attention_interval": 2}
    assert architecture(config).shape(every_other).layers == (0, 2, 4, 6)
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    config = {"model_type": "olmo_hybrid", **sizes}
    shape = architecture(config).shape(config)
    assert shape.layers == (0,)
    assert (shape.heads, shape.width, shape.value_heads, shape.value_width) == (4, 12, 4, 24)
    for kinds in (
        {"hybrid_override_pattern": "M-M*E"},
        {"layers_block_type": ["mamba", "moe"] * 2},
    ):
        config = {**SMALL["nemotron_h"], "layers_block_type": None, **kinds}
        assert architecture(config).shape(config).layers == (0, 2)


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_whose_keys_cannot_be_cut_alone_is_refused(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(InputError, match=f"'{model_type}' cannot be pruned: "):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "value_heads 3 must be a multiple of linear_num_key_heads"),
        ({"layer_types": ["full_attention"] * 3}, "3 entries, 0 of them 'linear_attention'"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types has 2 entries"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"\(fp8\): .*prune the model in"),
    ],
)
def test_a_config_that_cannot_be_cut_is_refused(tmp_path, change, message):
    config = {"model_type": "qwen3_5", **MULTIMODAL["qwen3_5"], "text_config": {**LINEAR, **change}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        _ = Checkpoint(tmp_path).shape
