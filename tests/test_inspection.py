"""`statecut inspect`: what a model keeps of a sequence, from config.json and headers alone."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SMALL

from statecut.cli import main
from statecut.models import create, load, save
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import SoftmaxLayers
from statecut.pruning.budget import budgets
from statecut.serving.inspection import inspect as inspect_checkpoint


def inspect(folder):
    checkpoint = Checkpoint(folder)
    return inspect_checkpoint(checkpoint, budgets(checkpoint))


LINEAR = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
}


def test_the_cache_of_qwen3_next():
    """48 layers, 36 of them linear with 32 value heads; 12 softmax layers, 2 heads of 256."""
    model = ARCHITECTURES["qwen3_next"].cache({
        "model_type": "qwen3_next", "num_hidden_layers": 48, "linear_num_value_heads": 32,
        "num_attention_heads": 16, "num_key_value_heads": 2, **LINEAR,
    })  # fmt: skip
    assert model.shape.state_bytes() == 75_497_472  # 36 x 32 x 128 x 128 x 4
    assert model.filter_bytes() == 1_769_472  # 36 x (2 x 16 x 128 + 32 x 128) x 3 x 2
    assert model.softmax_bytes(1) == 24_576  # 12 x 2 (k and v) x 2 x 256 x 2
    assert model.total_bytes(4_096) == 75_497_472 + 1_769_472 + 100_663_296
    half = model.resized(64)
    assert half.shape.state_bytes() == 75_497_472 // 2
    assert half.filter_bytes() == 1_769_472 * 3 // 4  # values keep theirs
    assert half.softmax_bytes(99) == model.softmax_bytes(99)


def test_the_state_of_the_largest_dense_qwen3_5():
    """64 layers, 48 of them linear with 48 value heads; 16 softmax layers, 4 heads of 256."""
    text = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64, "linear_num_value_heads": 48,
        "num_attention_heads": 24, "num_key_value_heads": 4, **LINEAR,
    }  # fmt: skip
    model = ARCHITECTURES["qwen3_5"].cache({"model_type": "qwen3_5", "text_config": text})
    assert model.shape.state_bytes() == 150_994_944
    assert model.softmax_bytes(1) == 65_536


def test_a_window_bounds_a_softmax_layers_cache():
    assert SoftmaxLayers(1, 2, 8, window=100).cache_bytes(1_000) == 2 * 2 * 8 * 100 * 2
    assert SoftmaxLayers(1, 2, 8, window=100).cache_bytes(10) == 2 * 2 * 8 * 10 * 2


def test_the_cache_of_an_fla_hybrid():
    config = {**SMALL["delta_net"], "hidden_size": 64, "num_hidden_layers": 6, "attn": [
        {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 2, "window_size": 16},
        {"layers": [5], "num_heads": 2},
    ]}  # fmt: skip
    hybrid = ARCHITECTURES["delta_net"].cache(config)
    assert hybrid.shape.layers == (0, 2, 4)
    assert hybrid.softmax == (SoftmaxLayers(2, 2, 16, window=16), SoftmaxLayers(1, 2, 32))
    assert hybrid.taps == 4
    assert ARCHITECTURES["delta_net"].cache({**config, "use_short_conv": False}).filter_bytes() == 0


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_the_cache_is_counted_as_transformers_has_it(tmp_path, name):
    save(create(SMALL[name], seed=1), tmp_path / name)
    config = json.loads((tmp_path / name / "config.json").read_text())
    counted = ARCHITECTURES[config["model_type"]].cache(config)
    filled = load(tmp_path / name)(torch.arange(9)[None], use_cache=True).past_key_values
    delta = [layer for layer in filled.layers if hasattr(layer, "recurrent_states")]
    softmax = [layer for layer in filled.layers if not hasattr(layer, "recurrent_states")]
    assert len(delta) == 2
    states = [layer.recurrent_states[0] for layer in delta]
    assert {state.dtype for state in states} == {torch.float32}
    assert counted.shape.state_bytes() == sum(state.nbytes for state in states)
    # transformers keeps one input of a channel more than its filter will need.
    inputs = sum(layer.conv_states[0][..., 1:].numel() for layer in delta)
    assert counted.filter_bytes() == 2 * inputs
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in softmax)
    assert counted.softmax_bytes(9) == 2 * numbers


def test_a_multimodal_config_is_counted_as_its_text_model():
    text = {**SMALL["qwen3_5"], "linear_conv_kernel_dim": 3}
    nested = {"model_type": "qwen3_5", "text_config": text}
    counted = ARCHITECTURES["qwen3_5"].cache(nested)
    assert counted == ARCHITECTURES["qwen3_5_text"].cache(text)
    assert counted.softmax == (SoftmaxLayers(1, heads=1, width=16),)
    assert counted.taps == 3


def test_a_multimodal_folder_is_inspected_with_its_text_models_widths(tmp_path):
    save(create(SMALL["qwen3_5"], seed=1), tmp_path / "text")
    (tmp_path / "all").mkdir()
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": text}
    (tmp_path / "all" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    tensors["model.visual.blocks.0.norm1.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "all" / "model.safetensors")
    alone, whole = inspect(tmp_path / "text"), inspect(tmp_path / "all")
    assert whole.parameters == alone.parameters + 7
    assert replace(whole, model_type=alone.model_type, parameters=alone.parameters) == alone


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("inspection")
    for name in ("gated_value_heads", "delta_net"):
        save(create(SMALL[name], seed=1), root / name)
    qwen = {**SMALL["qwen3_next"], "linear_key_head_dim": 64}
    save(create(qwen, seed=1), root / "qwen3_next")
    save(create({**qwen, "linear_value_head_dim": 128}, seed=1), root / "values_of_128")
    shutil.copytree(root / "delta_net", root / "hybrid")
    config = json.loads((root / "hybrid" / "config.json").read_text())
    config["attn"] = {"layers": [1], "num_heads": 2}
    (root / "hybrid" / "config.json").write_text(json.dumps(config))
    return root


def test_a_model_without_softmax_layers(models, capsys):
    assert main(["inspect", str(models / "gated_value_heads")]) == 0
    shown = capsys.readouterr().out
    weights = load_file(models / "gated_value_heads" / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in weights.values())
    # 2 layers x 4 x 8 x 16 x 4, and 2 x (2 x 2 x 8 + 4 x 16) x 3 x 2 bytes.
    for line in (
        f"model                gated_deltanet, {parameters:,} parameters in its files",
        "layers               2 with a delta rule\n",
        "heads                2 of keys, 4 of values; d_k 8, d_v 16",
        "cache per request    5.1 KiB: 4.0 KiB recurrent state in float32, 1.1 KiB of convolutions",
        "other cache          none",
        "      0    8     5.1 KiB     0 bytes  transformers\n",
        "    0.5    4     2.9 KiB     2.2 KiB  transformers\n",
        "--state  d_k x d_v to compare\n    0.5  4 x 16, 8 x 8\n   0.25  4 x 8, 8 x 4\n",
        "transformers  takes any d_k; run in Statecut's tests",
        "Nothing is known of gated_deltanet models in vllm, sglang",
    ):
        assert line in shown


def test_a_hybrid_and_its_json(models, capsys, tmp_path):
    file = tmp_path / "inspection.json"
    assert main(["inspect", str(models / "hybrid"), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "layers               1 with a delta rule, 1 with softmax attention" in shown
    record = json.loads(file.read_text())
    # One layer of 2 heads of 16 x 16 with a delta rule, one with 2 heads of 16 keys and values.
    recurrent, filters = 2 * 16 * 16 * 4, 3 * 32 * 3 * 2
    assert (record["recurrent_bytes"], record["filter_bytes"]) == (recurrent, filters)
    for context, tokens in zip(record["contexts"], (4_096, 32_768, 131_072), strict=True):
        assert context["tokens"] == tokens
        assert context["softmax_bytes"] == 2 * 2 * 16 * tokens * 2
        total = recurrent + filters + context["softmax_bytes"]
        assert context["state_share"] == (recurrent + filters) / total
        assert f"{tokens:7,}" in shown
    (half,) = [cut for cut in record["cuts"] if cut["ratio"] == 0.5]
    assert half["saved_bytes"] == recurrent // 2 + filters // 3
    assert half["state_bytes"] == recurrent + filters - half["saved_bytes"]
    assert half["saved_shares"][0] == half["saved_bytes"] / (recurrent + filters + 128 * 4_096)


def test_engines_are_named_with_the_widths_they_take(models, capsys):
    assert main(["inspect", str(models / "values_of_128")]) == 0
    shown = capsys.readouterr().out
    read = "expected: vllm, sglang, tensorrt-llm"
    assert re.search(rf"    0.5   32 .* transformers, mlx; {read}\n", shown)
    assert re.search(rf"   0.75   16 .* transformers; {read}\n", shown)
    assert (
        "vllm          takes d_k up to 256; start it with `--gdn-prefill-backend triton`" in shown
    )
    assert "llama.cpp     takes only d_k = d_v of 16, 32, 64, 128; its CPU path is run" in shown
    assert "Nothing is known" not in shown
    # Engines were read for d_v 128: of d_v 12 nothing is known but what was run.
    assert main(["inspect", str(models / "qwen3_next")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"    0.5   32 .* %  transformers\n", shown)
    assert "for d_v 128; nothing is known of d_v 12 (" in shown
    # d_k 64, d_v 12: mlx-lm takes multiples of 32, llama.cpp squares of 16 and more.
    line = "    0.5  32 x 12, 48 x 8; for mlx: 32 x 12, 64 x 6; for llama.cpp: none\n"
    assert line in shown


def test_the_numbers_of_the_weights_are_not_read(models, monkeypatch):
    monkeypatch.setattr("statecut.models.checkpoint.read_tensors", None)
    before = inspect(models / "delta_net")
    file = models / "delta_net" / "model.safetensors"
    weights = file.read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    file.write_bytes(weights[:header] + bytes(len(weights) - header))
    assert inspect(models / "delta_net") == before
    file.write_bytes(weights)


@pytest.fixture
def broken(models, tmp_path):
    return shutil.copytree(models / "delta_net", tmp_path / "broken")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def widths_that_contradict(folder):
    change_config(folder, expand_k=0.5)


def a_layer_without_projections(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def no_config(folder):
    (folder / "config.json").unlink()


def config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def half_its_shards(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    first = {n: t for n, t in tensors.items() if files[n] == "0.safetensors"}
    save_file(first, folder / "0.safetensors")
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def another_kind(folder):
    change_config(folder, model_type="llama")


def config_that_is_no_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe")


def config_that_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def heads_in_words(folder):
    change_config(folder, num_heads="two")


def no_heads(folder):
    change_config(folder, num_heads=0)


def softmax_without_heads(folder):
    change_config(folder, attn={"layers": [1]})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            widths_that_contradict,
            "q_proj.weight has 32 key channels, but the config says 2 heads of 8",
        ),
        (a_layer_without_projections, "the model has no model.layers.1.attn.q_proj.weight"),
        (no_config, "is not a model folder: it has no config.json"),
        (config_that_is_no_json, "config.json: not valid JSON"),
        (config_that_is_no_text, "config.json: not valid JSON"),
        (config_that_is_a_list, "config.json is not a model's"),
        (heads_in_words, "num_heads = 'two': must be a whole number"),
        (no_heads, "num_heads = 0: must be a whole number"),
        (no_weights, "it has no model.safetensors or"),
        (cut_off, "model.safetensors is cut off or damaged"),
        (half_its_shards, "names are missing (1.safetensors)"),
        (another_kind, "/broken: model_type 'llama' is none that Statecut knows"),
        (softmax_without_heads, "'num_heads' is missing"),
    ],
)
def test_bad_folders_are_named(broken, capsys, damage, message):
    damage(broken)
    assert main(["inspect", str(broken)]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_json_never_replaces_a_folder(models, tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    arguments = ["inspect", str(models / "gated_value_heads"), "--json"]
    assert main([*arguments, str(tmp_path / "kept")]) == 2
    assert "kept is a folder: give another name" in capsys.readouterr().err
    assert (tmp_path / "kept" / "file").is_file()
    assert main([*arguments, str(tmp_path / "kept" / "new.json")]) == 0


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_pruning_saves_what_inspect_says(models, tmp_path):
    arguments = ["prune", models / "gated_value_heads", tmp_path / "out", "--method", "l1"]
    assert main([*map(str, arguments), "--ratio", "0.5", "--no-refit"]) == 0
    (cut,) = [c for c in inspect(models / "gated_value_heads").cuts if c.ratio == 0.5]
    after = inspect(tmp_path / "out")
    assert (after.key_width, after.state_bytes) == (cut.width, cut.state_bytes)
