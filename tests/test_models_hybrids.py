"""transformers' hybrids of delta rules and softmax attention: cut, run and read back."""

import importlib
import inspect
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from small_models import EXPERTS, LINEAR, SMALL, VISION

import statecut
from reproduction.config.models import Model, shape_of
from reproduction.generation import generate
from reproduction.plan import parameters_at
from statecut.errors import InputError
from statecut.models import create, load, save
from statecut.models.architectures import ARCHITECTURES, REFUSED, architecture
from statecut.models.capture import capture_rule_inputs, mixers
from statecut.models.checkpoint import Checkpoint, check_parameters
from statecut.pruning.calibration import calibrate, calibrate_layerwise
from statecut.pruning.methods import METHODS
from statecut.pruning.refit import refit, write_refitted
from statecut.pruning.slicing import Keep, Pad, cut_back, eps_factor, slice_in_memory, slice_model
from statecut.record import Record
from statecut.recovery.training import scale_eps

NAMES = [name for name in SMALL if "layer_types" in SMALL[name]]
IDS = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(1))
MULTIMODAL = {
    "qwen3_5": {"text_config": {**LINEAR, "tie_word_embeddings": True},
                "vision_config": VISION, "tie_word_embeddings": True},
    "qwen3_5_moe": {"text_config": {**LINEAR, **EXPERTS}, "vision_config": VISION},
}  # fmt: skip


def some(checkpoint, width=5):
    shape = checkpoint.shape
    size = (len(shape.layers), shape.heads, shape.width)
    return Keep(
        torch.rand(size, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :width]
    )


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def read_plainly(folder, auto="AutoModelForCausalLM"):
    """By transformers alone; nothing may be missing, left over, or of another shape."""
    import transformers

    model, report = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each hybrid; the multimodal ones as the hub has them, with a head that predicts tokens."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    root = tmp_path_factory.mktemp("hybrids")
    for name in NAMES:
        save(create(SMALL[name], seed=3), root / name)
    for name, config in MULTIMODAL.items():
        torch.manual_seed(5)
        whole = AutoConfig.for_model(name, **config)
        AutoModelForImageTextToText.from_config(whole).save_pretrained(root / f"{name}_visual")
        weights = root / f"{name}_visual" / "model.safetensors"
        more = {"mtp.fc.weight": torch.randn(4, 4).bfloat16(), "mtp.norm.weight": torch.randn(4)}
        save_file({**load_file(weights), **more}, weights, metadata={"format": "pt"})
    return root


VISUAL = [f"{name}_visual" for name in MULTIMODAL]


@pytest.mark.parametrize("name", VISUAL)
def test_a_pruned_model_is_read_by_plain_transformers(folders, tmp_path, name):
    checkpoint = Checkpoint(folders / name)
    slice_model(checkpoint, some(checkpoint), tmp_path / "out", dtype=None)
    narrow = read_plainly(tmp_path / "out")
    assert {mixer.head_k_dim for mixer in mixers(narrow)[2]} == {5}
    assert torch.equal(logits(narrow), logits(load(tmp_path / "out")))
    assert not torch.allclose(logits(narrow), logits(load(folders / name)))
    count, _ = check_parameters(Checkpoint(tmp_path / "out"))
    assert count == sum(parameter.numel() for parameter in narrow.parameters())


@pytest.mark.parametrize("name", VISUAL)
def test_what_is_beyond_the_text_model_is_copied_as_it_is(folders, tmp_path, name):
    checkpoint = Checkpoint(folders / name)
    values = cut_back(checkpoint.shape, 7, "value")
    slice_model(checkpoint, some(checkpoint), tmp_path / "cut", values=values)
    cut = Checkpoint(tmp_path / "cut")
    write_refitted(cut, refit(cut, checkpoint, IDS), tmp_path / "out")
    out = Checkpoint(tmp_path / "out")
    assert out.files == checkpoint.files
    assert len(checkpoint.passthrough) == 23
    for key, new in out.tensors():
        if key.startswith(("mtp.", "model.visual.")):
            old = checkpoint.tensor(key)
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        else:
            assert new.dtype == torch.bfloat16
    assert out.config["text_config"] == {
        **checkpoint.config["text_config"], "linear_key_head_dim": 5, "linear_value_head_dim": 7,
        "rms_norm_eps": 1e-6 * (16 * 12 / (5 * 7)), "dtype": "bfloat16",
    }  # fmt: skip
    assert out.config["vision_config"] == checkpoint.config["vision_config"]
    read_plainly(tmp_path / "out", "AutoModelForImageTextToText")
    with pytest.raises(InputError, match=r"23 tensors beyond the text model .* would be lost"):
        cut.check_text_only()


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_the_left_is_seen_by_no_layer(folders, name):
    model, (short, long) = load(folders / name), (IDS[:1, :5], IDS[1:2, :9])
    padded = torch.cat([F.pad(short, (4, 0)), long])
    mask = torch.ones_like(padded)
    mask[0, :4] = 0

    def tokens(ids, mask=None):
        with torch.no_grad():
            out = model(ids, attention_mask=mask, use_cache=True)
        steps = generate(model, out.past_key_values, out.logits[:, -1:].argmax(-1), mask)
        return torch.cat([next(steps)[0] for _ in range(6)], 1)

    assert torch.equal(tokens(padded, mask), torch.cat([tokens(short), tokens(long)]))


def plain_queries_and_keys(model, index, x):
    """What the rule of a mixer receives for x (B, T, hidden), from its weights alone."""
    kind, shape, modules = mixers(model)
    mixer, keys = modules[index], shape.heads * shape.width
    if kind.model_type == "qwen3_next":
        blocks = mixer.in_proj_qkvz.weight.view(shape.heads, -1, x.shape[-1])
        q, k = blocks[:, : shape.width], blocks[:, shape.width : 2 * shape.width]
    elif kind.model_type == "olmo_hybrid":
        q, k = mixer.q_proj.weight, mixer.k_proj.weight
    else:
        q, k = mixer.in_proj_qkv.weight[:keys], mixer.in_proj_qkv.weight[keys : 2 * keys]
    weight = torch.cat([q.reshape(keys, -1), k.reshape(keys, -1)])
    filters = mixer.conv1d.weight[: 2 * keys]
    y = F.pad((x @ weight.mT).mT, (filters.shape[-1] - 1, 0))
    y = F.silu(F.conv1d(y, filters, groups=2 * keys)).mT
    return [part.unflatten(-1, (shape.heads, -1)) for part in y.split(keys, -1)]


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_is_shown_the_models_own_queries_and_keys(folders, name):
    model, inputs, received = load(folders / name), {}, {}
    with torch.no_grad(), capture_rule_inputs(model, received.__setitem__, inputs.__setitem__):
        model(IDS, use_cache=False)
        assert len(received) == 2
        for index, rule in received.items():
            expected = plain_queries_and_keys(model, index, inputs[index])
            for side, values in zip("qk", expected, strict=True):
                torch.testing.assert_close(rule[side], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_copies_are_summed(folders, name, monkeypatch):
    model = load(folders / name)
    kind, shape, _ = mixers(model)
    calibration = calibrate(model, [IDS[:1]])
    module, function = importlib.import_module(kind.call.module), kind.call.functions[0]
    rule, received = getattr(module, function), []

    def keeping_gradients(q, k, v, **more):
        received.append((q, k))
        q.retain_grad()
        k.retain_grad()
        return rule(q, k, v, **more)

    monkeypatch.setattr(module, function, keeping_gradients)
    (model(IDS[:1], labels=IDS[:1], use_cache=False).loss * 39).backward()
    for index, sides in enumerate(received):
        for side, x in zip("qk", sides, strict=True):
            effects = (x * x.grad).double().unflatten(2, (shape.heads, -1)).sum(3)
            torch.testing.assert_close(
                calibration.tensors[f"fisher.{side}"][index],
                effects.square().sum((0, 1)).detach() / 40,
                rtol=1e-4, atol=1e-10,
            )  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid"])
def test_every_method_cuts_them(folders, tmp_path, name):
    checkpoint = Checkpoint(folders / name)
    about = {"model_digest": checkpoint.digest()}
    calibration = calibrate(load(folders / name), [IDS], provenance=about)
    for method in METHODS:
        selection = statecut.select(folders / name, calibration, method=method, keys=6)
        slice_model(checkpoint, selection.change(), tmp_path / method, dtype=None)
        assert logits(load(tmp_path / method)).isfinite().all()
        assert Checkpoint(tmp_path / method).shape.layers == (0, 2)


def test_experts_in_one_tensor_are_read_as_well(folders, tmp_path):
    """Files may have each expert's matrices apart, or those of all in one, as in memory."""
    model = load(folders / "qwen3_5_moe")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    assert any("experts.gate_up_proj" in name for name in Checkpoint(tmp_path / "joined").files)
    assert torch.equal(logits(load(tmp_path / "joined")), logits(model))


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text"])
def test_the_card_of_a_multimodal_model_loads_all_of_it(model_type):
    config = {"model_type": model_type, **MULTIMODAL.get(model_type, {})}
    text = Record().then(training={}).files("name", config)["README.md"]
    assert ("AutoModelForImageTextToText.from_pretrained" in text) == (model_type == "qwen3_5")
    assert ("On a CPU, in plain PyTorch, the text model alone:" in text) == (
        model_type == "qwen3_5"
    )
    assert text.endswith('    model = statecut.load("name")\n')


def rewritten(source, target, change):
    """A copy of a folder with its tensors changed."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", ["olmo_hybrid", "qwen3_next"])
def test_what_is_missing_of_tensors_that_are_joined_is_named(folders, tmp_path, name):
    part, joint = {
        "olmo_hybrid": ("linear_attn.v_conv1d.weight", "linear_attn.conv1d.weight"),
        "qwen3_next": ("mlp.experts.1.up_proj.weight", "mlp.experts.gate_up_proj"),
    }[name]

    def remove(tensors):
        del tensors[next(key for key in tensors if key.endswith(part))]

    folder = rewritten(folders / name, tmp_path / "model", remove)
    with pytest.raises(InputError, match=f"Missing key.*{re.escape(joint)}"):
        load(folder)


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
    with pytest.raises(InputError, match=r"in thirds, whatever their widths: .*statecut\.save"):
        slice_model(Checkpoint(folder), some(Checkpoint(folder)), tmp_path / "cut")
    save(load(folder), tmp_path / "mended")  # as the message says
    slice_model(Checkpoint(tmp_path / "mended"), some(Checkpoint(folder)), tmp_path / "cut")


def test_functions_in_pytorch_stand_in_whatever_is_installed():
    from transformers.integrations import use_kernel_func_from_hub_with_fallback as decorate

    def plain(q):
        return q

    for package in ("fla", "no_such_package"):
        function = decorate("chunk_gated_delta_rule", package)(plain)
        assert function is not plain
        assert inspect.unwrap(function) is plain
    for name, function in ARCHITECTURES["qwen3_5_text"].cpu_fallbacks().items():
        assert "modeling_qwen3_5.py" in inspect.getsourcefile(function), name
        assert not hasattr(function, "__wrapped__")


def test_layer_types_may_follow_from_an_interval():
    config = {**SMALL["qwen3_5"], "num_hidden_layers": 8}
    del config["layer_types"]
    assert architecture(config).shape(config).layers == (0, 1, 2, 4, 5, 6)
    every_other = {**config, "full_attention_interval": 2}
    assert architecture(config).shape(every_other).layers == (0, 2, 4, 6)
    config = {**config, "model_type": "olmo_hybrid", "num_hidden_layers": 2}
    assert architecture(config).shape(config).layers == (0,)


def test_widths_of_olmo_that_its_config_leaves_out_are_those_of_transformers():
    config = {"model_type": "olmo_hybrid", "hidden_size": 64, "num_attention_heads": 4,
              "num_hidden_layers": 4}  # fmt: skip
    kind = architecture(config)
    shape = kind.shape(config)
    assert (shape.heads, shape.width, shape.value_heads, shape.value_width) == (4, 12, 4, 24)
    assert kind.shape(kind.resized(config, 5)).value_width == 24


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_whose_keys_cannot_be_cut_alone_is_refused(folders, tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(InputError, match=f"'{model_type}' cannot be pruned: ") as error:
        Checkpoint(tmp_path)
    if model_type in ("kimi_linear", "glm5_next"):
        assert re.search("keys, values and .* two gates; .* to be cut alike", str(error.value))


@pytest.mark.parametrize("where", ["config", "text_config"])
@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_quantised_weights_are_refused(folders, tmp_path, where, method):
    config = json.loads((folders / "qwen3_5_visual" / "config.json").read_text())
    part = config if where == "config" else config["text_config"]
    part["quantization_config"] = {"quant_method": method, "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=rf"quantization_config \({method}\): .*prune the model in"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "value_heads 3 must be a multiple of linear_num_key_heads"),
        ({"layer_types": ["full_attention"] * 3}, "3 entries, 0 of them 'linear_attention'"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types has 2 entries"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim = 0: .*must be a whole number"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(change, message):
    config = {**SMALL["qwen3_5"], **change}
    with pytest.raises(InputError, match=message):
        architecture(config).shape(config)


@pytest.mark.parametrize("name", NAMES)
def test_in_memory_they_are_padded_and_cut_back(folders, name):
    model = load(folders / name)
    shape = mixers(model)[1]
    wide = slice_in_memory(model, Pad(20), eps="kept")
    scale_eps(wide, eps_factor(shape, replace(shape, width=20)))
    torch.testing.assert_close(logits(wide), logits(model), rtol=1e-4, atol=1e-4)
    back = slice_in_memory(wide, cut_back(shape, shape.width), eps="kept")
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize("name", [*NAMES, *VISUAL])
def test_layer_by_layer_they_are_calibrated_as_at_once(folders, name):
    """Layers are of two kinds, and each gets the mask and the rotary angles of its own."""
    batches = [IDS[:2], IDS[2:]]
    whole = calibrate(load(folders / name), batches)
    layered = calibrate_layerwise(Checkpoint(folders / name), batches)
    for key, tensor in layered.tensors.items():
        torch.testing.assert_close(tensor, whole.tensors[key], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("tied", [True, False])
def test_a_section_of_the_configuration_makes_one(tied):
    section = TypeAdapter(Model).validate_python({
        "architecture": "qwen3_5_text", "label": "Hybrid", "tokenizer": "t",
        "source": {"kind": "pretrain", "recipe": "r"}, "vocab_size": 97, "hidden_size": 32,
        "num_hidden_layers": 5, "num_heads": 2, "head_dim": 16, "expand_v": 0.75, "num_v_heads": 4,
        "softmax_every": 2, "softmax_heads": 4, "softmax_kv_heads": 2, "softmax_head_dim": 8,
        "intermediate_size": 48, "tie_word_embeddings": tied,
    })  # fmt: skip
    model = create(section.fla_config(), seed=0)
    assert section.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert section.mixer_shape == mixers(model)[1]
    assert section.mixer_shape.layers == (0, 2, 4)
    assert (section.head_k_dim, section.head_v_dim, section.value_heads) == (16, 12, 4)
    # Its rule gets queries and keys once for each value head.
    assert shape_of(section).name == "gated_deltanet-4x16-4x12"
    narrow = create(section.adapter.resized(section.fla_config(), 4), seed=0)
    assert parameters_at(section, 0.75) == sum(p.numel() for p in narrow.parameters())
    assert model(IDS, labels=IDS).loss.isfinite()
