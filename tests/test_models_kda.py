"""Hybrids of Kimi Delta Attention: one width for keys and values, and files with names of their
own."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from small_models import ALL, SMALL, SQUARE, VISION, logits, relative, rewritten, save_stock, some

import statecut
from statecut.errors import InputError
from statecut.models import plain_kernels
from statecut.models.architectures import architecture
from statecut.models.checkpoint import Checkpoint, create, load
from statecut.pruning.refit import check_refit, refit, write_refitted
from statecut.pruning.slicing import slice_model

IDS = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(1))


def lacking(name):
    """Skips a test of a model that the installed transformers has not."""
    return pytest.mark.skipif(name not in SMALL, reason=architecture(ALL[name]).missing() or "-")


@pytest.mark.parametrize("name", SQUARE)
def test_keys_and_values_of_one_width_are_cut_together(folders, tmp_path, name):
    """Whatever says how much; each place of the config that says the width says the new one."""
    model, out = folders / name, tmp_path / "out"
    before = statecut.inspect(model)
    assert "one width for both: a cut is a square" in str(before)
    assert before.splits == {0.5: [(8, 8)], 0.25: [(6, 6)], 0.125: [(4, 4)]}
    (half,) = (cut for cut in before.cuts if cut.ratio == 0.5)
    statecut.prune(model, out, ratio=0.5, method="l1", refit=False)
    after, config = statecut.inspect(out), Checkpoint(out).config
    assert (after.key_width, after.value_width) == (8, 8)
    assert after.recurrent_bytes + after.filter_bytes == half.state_bytes
    nested = config.get("linear_attn_config") or {}
    assert {config["linear_head_dim"], nested.get("head_dim", 8)} == {8}
    assert config["v_head_dim"] == SMALL[name]["v_head_dim"]  # MLA's
    for wrong in ({"keys": 5}, {"values": 5}, {"keys": 6, "values": 5}):
        with pytest.raises(InputError, match=r"one width, .*give --keys 5 --values 5"):
            statecut.prune(model, out, **wrong, method="l1", refit=False)
    with pytest.raises(InputError, match="method pca_proper chooses no value"):
        statecut.prune(model, out, ratio=0.5, method="pca_proper", refit=False)


@lacking("glm5_next")
def test_layers_that_predict_further_tokens_are_copied(tmp_path):
    """And stock transformers reads the multimodal model around a cut text model."""
    from transformers import AutoModelForImageTextToText

    text = {**SMALL["glm5_next"], "num_nextn_predict_layers": 1}
    vision = {**VISION, "projection_intermediate_size": 16}
    save_stock(tmp_path / "stock", "glm5_next", {"text_config": text, "vision_config": vision})
    parts = ("eh_proj", "self_attn.o_proj", "mlp.down_proj")
    more = {f"model.language_model.layers.3.{part}.weight": torch.randn(32, 32) for part in parts}
    whole = Checkpoint(rewritten(tmp_path / "stock", tmp_path / "whole", lambda t: t.update(more)))
    slice_model(whole, some(whole.shape, 5, "key"), tmp_path / "cut", values=some(whole.shape, 5))
    cut = Checkpoint(tmp_path / "cut")
    write_refitted(cut, refit(cut, whole, IDS), tmp_path / "out")
    out = Checkpoint(tmp_path / "out")
    assert out.files == whole.files
    assert set(more) <= set(out.passthrough)
    assert all(torch.equal(out.tensor(name), tensor) for name, tensor in more.items())
    model, report = AutoModelForImageTextToText.from_pretrained(
        out.folder, output_loading_info=True, dtype=torch.float32
    )
    assert {kind: set(names) for kind, names in report.items() if names} == {
        "unexpected_keys": set(more)
    }
    ours = load(out.folder, dtype=torch.float32)
    assert relative(logits(model.eval(), IDS), logits(ours, IDS)) < 1e-5


@lacking("bailing_hybrid")
def test_files_keep_the_names_that_they_have(folders, tmp_path):
    """Ling 3 is published with an o_proj in layers with a delta rule; transformers saves others."""

    def as_published(tensors):
        for layer in (0, 2):
            at = f"model.layers.{layer}.attention."
            tensors[f"{at}o_proj.weight"] = tensors.pop(f"{at}dense.weight")

    saved = Checkpoint(folders / "bailing_hybrid")
    published = Checkpoint(rewritten(saved.folder, tmp_path / "published", as_published))
    for model in (saved, published):
        del model.stored["model.layers.0.mlp.down_proj.weight"]
        with pytest.raises(InputError, match=r"the 24 unknowns .* of model.layers.2.self_attn.o_p"):
            check_refit(model, sequences=2, length=2)
    changes = {"keys": some(saved.shape, 5, "key"), "values": some(saved.shape, 5)}
    for model, out in ((saved, tmp_path / "one"), (published, tmp_path / "other")):
        slice_model(model, **changes, out=out, dtype=None)
        assert Checkpoint(out).files == model.files
    one, other = (logits(load(tmp_path / name), IDS) for name in ("one", "other"))
    assert torch.equal(one, other)


K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear", "hidden_size": 16, "vocab_size": 97, "num_hidden_layers": 3,
        "num_attention_heads": 2, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {"head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 4,
                               "kda_layers": [1, 2], "full_attn_layers": [3],
                               "gate_lower_bound": -5.0, "use_full_rank_gate": True},
        "quantization_config": {"quant_method": "compressed-tensors",
                                "ignore": ["re:.*self_attn.*", "re:.*lm_head.*"]},
    },
}  # fmt: skip


def k3_tensors(hidden=16, heads=3, width=8):
    """Of two layers with a delta rule and one with MLA, as Kimi K3's files have them."""
    inner, generator = heads * width, torch.Generator().manual_seed(5)
    rule = {
        **{f"{part}_proj.weight": (inner, hidden) for part in "qkvg"},
        **{f"{side}_conv1d.weight": (inner, 1, 4) for side in "qkv"},
        "f_a_proj.weight": (width, hidden), "f_b_proj.weight": (inner, width), "A_log": (width,),
        "dt_bias": (inner,), "b_proj.weight": (heads, hidden), "o_norm.weight": (width,),
        "o_proj.weight": (hidden, inner),
    }  # fmt: skip
    mla = {"kv_a_proj_with_mqa.weight": (16, hidden), "g_proj.weight": (24, hidden)}
    text = {"embed_tokens.weight": (97, hidden), "layers.0.mlp_res_proj.weight": (1, hidden)}
    for layer, mixer in enumerate((rule, rule, mla)):
        text |= {f"layers.{layer}.self_attn.{name}": shape for name, shape in mixer.items()}
    shapes = {f"language_model.model.{name}": shape for name, shape in text.items()}
    shapes |= {"language_model.lm_head.weight": (97, hidden), "vision_tower.wo.weight": (4, 4)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    expert = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_"
    packed = torch.arange(64, dtype=torch.uint8)
    return tensors | {expert + "packed": packed, expert + "scale": packed[:4].clone()}


def k3_mixer(tensors, layer, x, eps, heads=3):
    """What a layer with a delta rule makes of x (B, T, hidden): from published weights alone."""
    at = f"language_model.model.layers.{layer}.self_attn."
    W = {name.removeprefix(at): t.double() for name, t in tensors.items() if name.startswith(at)}

    def convolved(side):
        y = F.pad((x @ W[f"{side}_proj.weight"].mT).mT, (3, 0))
        y = F.silu(F.conv1d(y, W[f"{side}_conv1d.weight"], groups=y.shape[1])).mT
        return y.unflatten(-1, (heads, -1))

    decay = (x @ W["f_a_proj.weight"].mT @ W["f_b_proj.weight"].mT).unflatten(-1, (heads, -1))
    o, _ = plain_kernels.kda(
        **{side: convolved(side) for side in "qkv"},
        beta=(x @ W["b_proj.weight"].mT).sigmoid(),
        g=decay,
        A_log=W["A_log"][:heads],
        dt_bias=W["dt_bias"],
        lower_bound=-5.0,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
    )
    o = F.rms_norm(o, (o.shape[-1],), W["o_norm.weight"], eps).flatten(-2)
    return (o * (x @ W["g_proj.weight"].mT).sigmoid()) @ W["o_proj.weight"].mT


def test_a_model_without_a_class_is_cut_by_its_weights(tmp_path):
    tensors, folder = k3_tensors(), tmp_path / "k3"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(K3))
    (text := tmp_path / "text.txt").write_text("Words.")
    for name in ("tiktoken.model", "chat_template.json"):
        (folder / name).write_text("{}")
    with pytest.raises(InputError, match="no class for kimi_k3; it can be cut without text"):
        statecut.prune(folder, tmp_path / "out", ratio=0.5, text=text)
    statecut.prune(folder, tmp_path / "out", ratio=0.5, round_to=1, method="l1", refit=False)
    assert statecut.inspect(tmp_path / "out").value_width == 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "transformers has no class for kimi_k3" in card
    assert "from_pretrained" not in card
    assert (tmp_path / "out" / "tiktoken.model").is_file()
    assert (tmp_path / "out" / "chat_template.json").is_file()
    whole = Checkpoint(folder)
    keys, values = some(whole.shape, 5, "key"), some(whole.shape, 5)
    slice_model(whole, keys, tmp_path / "cut", values=values, dtype=None)
    cut = Checkpoint(tmp_path / "cut")
    sliced, eps = dict(cut.tensors()), cut.config["text_config"]["rms_norm_eps"]
    assert sliced.keys() == tensors.keys()
    assert eps == pytest.approx(1e-5 * 64 / 25)
    kept = ("lm_head", "embed_tokens", "vision_tower", "experts", "layers.2.", "mlp_res", "A_log")
    assert all(torch.equal(sliced[n], t) for n, t in tensors.items() if any(k in n for k in kept))
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for layer in (0, 1):
        at = f"language_model.model.layers.{layer}.self_attn."
        for change, parts in ((keys, ("q", "k", "f_b")), (values, ("v",))):
            dropped = torch.ones(3, 8, dtype=torch.bool).scatter(1, change.kept[layer], False)
            for part in parts:
                tensors[f"{at}{part}_proj.weight"][dropped.flatten()] = 0
        first, second = (tensors[f"{at}f_{side}_proj.weight"] for side in "ab")
        U, S, V = torch.linalg.svd(second.double() @ first.double(), full_matrices=False)
        tensors[f"{at}f_a_proj.weight"] = V[:5]
        tensors[f"{at}f_b_proj.weight"] = U[:, :5] * S[:5]
        found, expected = k3_mixer(sliced, layer, x, eps), k3_mixer(tensors, layer, x, 1e-5)
        assert relative(found, expected) < 1e-5  # the weights are float32


def test_a_class_that_transformers_lacks_is_an_error_that_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("statecut.models.architectures.base.installed", lambda _: "5.17.0")
    config, needs = ALL["bailing_hybrid"], "bailing_hybrid needs transformers 5.23 or newer"
    with pytest.raises(InputError, match=f"{needs}, and 5.17.0 is installed"):
        create(config, seed=1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{needs}.*; it can be cut without text"):
        load(tmp_path)


def test_a_published_kimi_linear_counts_its_layers_from_one():
    config = {key: value for key, value in ALL["kimi_linear"].items() if key != "layer_types"}
    assert architecture(config).shape(config).layers == (0, 2)
    flat = {**config, "linear_attn_config": None, "linear_head_dim": 9, "linear_num_heads": 4}
    shape = architecture(flat).shape({**flat, "num_hidden_layers": 6})
    assert (shape.layers, shape.heads, shape.width, shape.value_width) == ((0, 1, 2, 3, 5), 4, 9, 9)
