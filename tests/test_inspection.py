"""`statecut inspect`: what a model keeps of a sequence, from config.json and headers alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving import LATENT
from small_models import HYBRIDS, SMALL, change_config, rewritten

import statecut
from statecut.cli import main
from statecut.errors import InputError
from statecut.files import read_json
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import create, load, save
from statecut.models.shapes import Cache, MixerShape, SoftmaxLayers
from statecut.serving import memory


def test_the_cache_of_an_fla_hybrid():
    softmax = [
        {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 2, "window_size": 16},
        {"layers": [5], "num_heads": 2},
    ]
    config = {**SMALL["delta_net"], "hidden_size": 64, "num_hidden_layers": 6, "attn": softmax}
    hybrid = ARCHITECTURES["delta_net"].cache(config)
    assert hybrid.shape.layers == (0, 2, 4)
    assert hybrid.softmax == (SoftmaxLayers(2, 2, 16, window=16), SoftmaxLayers(1, 2, 32))
    assert [hybrid.softmax[0].cache_bytes(n) for n in (10, 1000)] == [20 * 128, 32 * 128]
    assert hybrid.taps == 4
    assert ARCHITECTURES["delta_net"].cache({**config, "use_short_conv": False}).filter_bytes() == 0


KEPT = ("keys", "values", "indexer_keys")  # of tokens, in softmax layers


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_cache_is_counted_as_transformers_has_it(folders, name):
    counted = ARCHITECTURES[SMALL[name]["model_type"]].cache(SMALL[name])
    filled = load(folders / name)(torch.arange(9)[None], use_cache=True).past_key_values
    delta = [filled.layers[layer] for layer in counted.shape.layers]
    softmax = [layer for layer in filled.layers if getattr(layer, "keys", None) is not None]
    assert len(delta) == 2
    states = [layer.recurrent_states[0] for layer in delta]
    assert {state.dtype for state in states} == {torch.float32}
    assert counted.shape.state_bytes() == sum(state.nbytes for state in states)
    # transformers keeps one input of a channel more than its filter will need.
    inputs = sum(layer.conv_states[0][..., 1:].numel() for layer in delta)
    assert counted.filter_bytes() == 2 * inputs
    kept = [getattr(layer, name, None) for layer in softmax for name in KEPT]
    numbers = sum(tensor.numel() for tensor in kept if tensor is not None)
    if pool := SMALL[name].get("index_kpool"):  # transformers keeps what pools them, too
        width = SMALL[name]["index_head_dim"]
        numbers += 9 * (width // pool - (2 * width + 1))
    assert counted.softmax_bytes(9) == 2 * numbers


def test_a_multimodal_folder_is_inspected_with_its_text_models_widths(folders, tmp_path):
    def as_the_hub_has_them(tensors):
        for name in [*tensors]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.blocks.0.norm1.weight"] = torch.zeros(7)

    text = json.loads((folders / "qwen3_5" / "config.json").read_text())
    both = {"model_type": "qwen3_5", "text_config": text}
    rewritten(folders / "qwen3_5", tmp_path / "all", as_the_hub_has_them, **both)
    alone, whole = statecut.inspect(folders / "qwen3_5"), statecut.inspect(tmp_path / "all")
    assert whole.parameters == alone.parameters + 7
    assert "mlx" in whole.cuts[0].runs_in
    assert "mlx" not in alone.cuts[0].runs_in  # which has no class for it
    cuts = (
        replace(cut, runs_in=text_cut.runs_in, expected_in=text_cut.expected_in)
        for cut, text_cut in zip(whole.cuts, alone.cuts, strict=True)
    )
    same = {"model_type": alone.model_type, "parameters": alone.parameters, "cuts": tuple(cuts)}
    assert replace(whole, **same) == alone


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("inspection")
    for name in ("gated_value_heads", "delta_net"):
        save(create(SMALL[name], seed=1), root / name)
    qwen = {**SMALL["qwen3_next"], "linear_key_head_dim": 64, "linear_value_head_dim": 128}
    save(create(qwen, seed=1), root / "qwen3_next")
    rewritten(root / "delta_net", root / "hybrid", attn={"layers": [1], "num_heads": 2})
    return root


def test_a_hybrid_and_its_json(models, capsys, tmp_path):
    file = tmp_path / "inspection.json"
    assert main(["inspect", str(models / "hybrid"), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "1 with a recurrent state, 1 with softmax attention" in shown
    assert "softmax attention (16 bits): 512.0 KiB at 4,096, 4.0 MiB at 32,768" in shown
    record = json.loads(file.read_text())
    assert main(["inspect", str(models / "hybrid"), "--json", str(models)]) == 2
    assert f"{models.name} is a folder: give another name" in capsys.readouterr().err
    # One layer of 2 heads of 16 x 16 with a delta rule, one with 2 heads of 16 keys and values.
    recurrent, filters = 2 * 16 * 16 * 4, 3 * 32 * 3 * 2
    assert (record["recurrent_bytes"], record["filter_bytes"]) == (recurrent, filters)
    tokens = (4_096, 32_768, 131_072)
    assert record["softmax_bytes"] == [2 * 2 * 16 * n * 2 for n in tokens]
    (half,) = [cut for cut in record["cuts"] if cut["ratio"] == 0.5]
    saved = recurrent // 2 + filters // 3
    assert half["state_bytes"] == recurrent + filters - saved
    assert half["saved"] == [saved / (recurrent + filters + 128 * n) for n in tokens]
    assert f"{100 * half['saved'][0]:8.1f}%" in shown


def test_a_config_alone_says_the_same(models, tmp_path):
    folder, alone = models / "qwen3_next", models / "qwen3_next" / "config.json"
    whole = statecut.inspect(folder)
    assert replace(whole, parameters=0) == statecut.inspect(alone)
    assert str(statecut.inspect(alone)).splitlines()[0] == "model              qwen3_next"
    with pytest.raises(InputError, match="for --engine vllm give the model's folder"):
        statecut.inspect(alone, engine="vllm")
    with pytest.raises(InputError, match=r"nowhere.json: cannot be read: No such file"):
        statecut.inspect(tmp_path / "nowhere.json")
    config = json.loads(alone.read_text())
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="'num_key_value_heads' is missing"):
        statecut.inspect(tmp_path / "config.json")


def test_engines_are_named_with_the_widths_they_take(models):
    shown = str(statecut.inspect(models / "qwen3_next"))
    run = "transformers, vllm.statecut, sglang, mlx"
    assert re.search(rf"    0.5   32 .*%  {run}; tensorrt-llm\n", shown)
    assert re.search(r"   0.75   16 .*%  transformers, mlx; vllm.statecut, sglang, tens", shown)
    shown = str(statecut.inspect(models / "qwen3_next", engine="tensorrt-llm"))
    assert "compared, for tensorrt-llm\n    0.5  32 x 128\n   0.25  16 x 128\n" in shown
    assert shown.splitlines()[-1].startswith("TensorRT-LLM: takes d_k up to 256 with d_v 128")
    with pytest.raises(InputError, match="run right in vLLM; engines for it: transformers"):
        statecut.inspect(models / "delta_net", engine="vllm")


LOGGED = read_json(Path(__file__).parents[1] / "benchmarks" / "h200" / "serving_speed.json")


@pytest.mark.parametrize("row", [row for row in LOGGED if row["state"] == "float32"])
def test_vllm_logs_the_same_block_and_requests(row):
    """Of a model with the shapes of Qwen3.5-4B."""
    width, values = map(int, row["width"].split("x"))
    softmax = (SoftmaxLayers(8, heads=4, width=256),)
    cache = Cache(MixerShape((*range(24),), 16, width, 32, values), taps=4, softmax=softmax)
    load = memory.Load(tokens=4352, prefix_cache=row["prefix_cache"])
    room, logged = memory.vllm(cache, row["cache_gb"] * 1e9, load), row["vllm_logs"]
    assert (room.block, room.requests) == (logged["block_tokens"], int(logged["requests"]))


def test_vllm_logs_the_same_of_kimi_linear():
    """1 GiB for caches, requests of 512 tokens, prefix caching: benchmarks/serving.py."""
    load, logged = memory.Load(tokens=512, prefix_cache=True), [(128, 728), (32, 1323), (16, 1533)]
    for width, expected in zip((128, 64, 32), logged, strict=True):
        attention = {**LATENT["linear_attn_config"], "head_dim": width}
        cache = ARCHITECTURES["kimi_linear"].cache({**LATENT, "linear_attn_config": attention})
        room = memory.vllm(cache, 2**30, load)
        assert (room.block, room.requests) == expected


def test_requests_that_fit(models, capsys):
    command = ["inspect", str(models / "qwen3_next"), "--engine", "sglang", "--memory", "1GB"]
    assert main(command) == 0
    few = capsys.readouterr().out
    assert "requests of 4,096 tokens that fit as SGLang counts: of 1 GB 858" in few
    assert main([*command, "--prefix-cache", "--drafts", "2"]) == 0
    assert re.search(r"\n   32 +7 x \d", capsys.readouterr().out)  # five slots, and two
    none = str(statecut.inspect(models / "qwen3_next", engine="vllm", memory=0.001, tokens=10**6))
    # Not even one, and nothing to compare with; vLLM alone takes no 64 x 128.
    assert re.search(r"\n   64 .* 0  does not run there\n", none)
    with pytest.raises(InputError, match=r"the weights take 0\.0 GB of the 90% that engines use"):
        statecut.inspect(models / "qwen3_next", engine="vllm", memory=0)


def test_neither_torch_nor_the_numbers_of_the_weights_are_read(models, tmp_path):
    shutil.copytree(models / "delta_net", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    file.write_bytes(file.read_bytes()[:header] + bytes(file.stat().st_size - header))
    program = (
        "import statecut, sys; print(statecut.inspect(sys.argv[1]));"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == f"{statecut.inspect(models / 'delta_net')}\n"


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BAD = [
    (lambda f: (f / CONFIG).unlink(), "is not a model folder: it has no config.json"),
    (lambda f: (f / CONFIG).write_text("{"), "config.json: not valid JSON"),
    (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe"), "config.json: not valid JSON"),
    (lambda f: (f / CONFIG).write_text("[]"), "config.json is not a model's"),
    (lambda f: change_config(f, num_heads="two"), "num_heads = 'two': must be a whole number"),
    (lambda f: change_config(f, num_heads=0), "num_heads = 0: must be a whole number"),
    (lambda f: change_config(f, attn={"layers": [1]}), "'num_heads' is missing"),
    (lambda f: change_config(f, model_type="llama"), "'llama' is none that Statecut knows"),
    (lambda f: change_config(f, model_type="deltanet"), "did you mean 'delta_net'"),
    (lambda f: (f / WEIGHTS).unlink(), "it has no model.safetensors or"),
    (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "has pickled weights only, which"),
    (lambda f: os.truncate(f / WEIGHTS, 1000), "model.safetensors is cut off or damaged"),
    (shutil.rmtree, "no such folder"),
    (lambda f: (f / INDEX).write_text("[]"), "model.safetensors.index.json: has no weight_map"),
]


@pytest.mark.parametrize(("damage", "message"), BAD)
def test_bad_folders_are_named(models, tmp_path, damage, message):
    broken = shutil.copytree(models / "delta_net", tmp_path / "broken")
    damage(broken)
    with pytest.raises(InputError, match=re.escape(message)):
        statecut.inspect(broken)


def test_pruning_saves_what_inspect_says(models, tmp_path):
    model = models / "gated_value_heads"
    statecut.prune(model, tmp_path / "out", ratio=0.5, method="l1", refit=False)
    (cut,) = [cut for cut in statecut.inspect(model).cuts if cut.ratio == 0.5]
    after = statecut.inspect(tmp_path / "out")
    assert after.key_width == cut.width
    assert after.recurrent_bytes + after.filter_bytes == cut.state_bytes
