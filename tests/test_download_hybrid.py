"""config/qwen3_5.yaml on a model of the same form and a thousandth of the size, from a hub of our
own: downloaded, calibrated, pruned, refitted and evaluated by the workflow."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
import yaml
from evaluation_runs import TEXT, write_lines
from hub_server import Hub
from safetensors.torch import load_file, save_file

from reproduction.config import load_config
from reproduction.download import download_and_check
from reproduction.new_tokenizers import train_tokenizer
from statecut.files import read_json, write_json

ROOT = Path(__file__).parents[1]
NAME = "Qwen/Qwen3.5-0.8B"
SHARD = "model.safetensors-00001-of-00001.safetensors"
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 2,
         "head_dim": 16, "softmax_heads": 2, "softmax_kv_heads": 1, "softmax_head_dim": 16,
         "intermediate_size": 48}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
          "out_hidden_size": 32, "num_position_embeddings": 16}  # fmt: skip


def stand_in(folder: Path) -> Path:
    """The run's configuration in a checkout of its own, with sizes and text for a CPU."""
    for name in ("workflow", "scripts", "profiles", "envs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "config").mkdir()
    for name in ("claims.yaml", "published"):
        (folder / "config" / name).symlink_to(ROOT / "config" / name)
    data = yaml.safe_load((ROOT / "config" / "qwen3_5.yaml").read_text())
    data["device"] = "cpu"
    (model,) = data["models"].values()
    model |= SIZES
    data["corpora"]["fineweb_edu"] |= {"length": 32, "slices": {"calibration": 16}}
    data["calibration"] |= {"sequences": 16, "rows": 200}
    prose, words = folder / "prose.raw", folder / "words.jsonl"
    prose.write_text(f" = Title = \n {TEXT[:2000]}\n")
    write_lines(words, [{"text": line} for line in TEXT.splitlines()[:8]])
    suite = data["evaluation"]["suites"]["ppl"]
    suite["window"] = 64
    for task, file in zip(suite["tasks"].values(), (prose, words), strict=True):
        task["file"] = str(file)
    table = data["tables"]["refit"]
    table |= {"methods": ["drrqr"], "ratios": [0.5], "columns": {"pre": ["ppl"], "refit": ["ppl"]}}
    path = folder / "config" / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def push_model(hub: Hub, folder: Path, sizes: dict[str, object]) -> None:
    """A random multimodal model as the hub has it: one shard, its index, and a predictor (mtp)."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5", text_config=sizes, vision_config=VISION, tie_word_embeddings=True
    )
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.randn(4, 4)}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, SHARD)}
    write_json(folder / "model.safetensors.index.json", index)
    train_tokenizer([TEXT], folder / "tokenizer", vocabulary_size=300)
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / file.name)
    (folder / "tokenizer").rmdir()
    hub.push("model", NAME, folder)


def test_the_configuration_of_a_public_hybrid_runs_from_its_download_to_its_table(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, folder = tmp_path / "checkout", tmp_path / "model"
    checkout.mkdir()
    monkeypatch.chdir(checkout)
    path = stand_in(checkout)
    config = load_config(path)
    push_model(hub, folder, config.models["qwen3_5_0.8B"].fla_config())
    text = io.BytesIO()
    pandas.DataFrame({"text": [TEXT] * 4}).to_parquet(text)
    corpus = {"sample/10BT/000_00000.parquet": text.getvalue()}
    hub.push("dataset", "HuggingFaceFW/fineweb-edu", corpus)
    _, problems = download_and_check(config)
    assert problems == ""
    done = subprocess.run(
        [sys.executable, "-m", "reproduction.running.preload", sys.executable, "-m", "snakemake",
         "--configfile", path, "--cores", "2", "results/qwen3_5/tables/refit.tex"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    refitted = checkout / "results/qwen3_5/refitted/qwen3_5_0.8B/drrqr-kq-0.5-0-matched"
    assert read_json(refitted / "config.json")["text_config"]["linear_key_head_dim"] == 8
    before, after = load_file(folder / SHARD), load_file(refitted / SHARD)
    assert set(after) == set(before)
    for name in before:
        if name.startswith(("mtp.", "model.visual.")):
            assert torch.equal(after[name], before[name])
    with open(checkout / "results/qwen3_5/tables/refit.csv") as file:
        *rows, _, note = csv.DictReader(file)
    assert note["Model"] == "1 draw of channels or text"
    assert [row["Method"] for row in rows] == ["DRRQR", "Baseline"]
    assert all(float(row[column]) > 1 for row in rows for column in row if "↓" in column)
