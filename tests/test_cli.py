"""The command line as a user meets it: what works, and what it says when something is wrong."""

import json
import logging
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import torch
from safetensors.torch import load_file
from small_models import SMALL, logits, rewritten, workplace

from statecut import logs
from statecut.cli import main
from statecut.data.progress import Progress
from statecut.errors import InputError
from statecut.files import atomic_write
from statecut.models.checkpoint import Checkpoint, create, load, save
from statecut.pruning.request import Request


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    wide = {**SMALL["gated"], "head_dim": 48, "expand_v": 0.5}
    return workplace(root, "delta_net", "gated", "shared_head", "qwen3_5_tied", wide=wide)


def run(*arguments):
    return main([str(argument) for argument in arguments])


def prune(root, *more, model="delta_net", out="out", text="text.jsonl"):
    """The cut alone, by DRRQR, unless `more` says otherwise."""
    return run(
        "prune", root / model, root / out, "--ratio", "0.5", "--text", root / text, "--sequences",
        "6", "--length", "40", "--rows", "100", "--method", "drrqr", "--no-refit", *more,
    )  # fmt: skip


def without_text(model, out, *more):
    return run("prune", model, out, "--ratio", "0.5", "--method", "l1", *more)


def stderr(capsys):
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("name", ["delta_net", "gated", "shared_head"])
def test_prune_writes_a_smaller_model_with_a_card(root, tmp_path, capsys, monkeypatch, name):
    out = tmp_path / "out"
    monkeypatch.setattr("statecut.pruning.calibration.load", None)  # one layer at a time
    assert prune(root, model=name, out=out) == 0
    model = load(out)
    assert model.model.layers[0].attn.head_k_dim == 8
    # DeltaNet's kernel takes no float32; the other keeps it.
    assert model.dtype == (torch.float32 if name == "gated" else torch.bfloat16)
    assert logits(model, torch.arange(9)[None]).isfinite().all()
    assert (out / "tokenizer.json").is_file()
    card = (out / "README.md").read_text()
    assert f"base_model: {name}" in card
    assert ("    import fla.models\n" in card) == (name != "shared_head")
    assert '    import statecut\n    model = statecut.load("out")\n' in card
    shown = capsys.readouterr()
    for line in ("key channels per head +8 of 16", "swaps of keys",
                 r"perplexity +[\d,.]+ +[\d,.]+\n", "cache bytes per request"):  # fmt: skip
        assert re.search(line, shown.out)
    assert "selecting: drrqr keeps 8 of 16 key channels per head" in shown.err
    assert ("as bfloat16: DeltaNet's kernel refuses" in shown.err) == (name != "gated")


def test_out_says_what_it_is_and_its_command_makes_it_again(root, tmp_path, monkeypatch):
    previous, out = os.umask(0o027), tmp_path / "told"
    perplexities = iter((10.0, 12.0, 11.0) * 2)  # in this order: the weights are random
    monkeypatch.setattr("statecut.pruning.prune.measure", lambda *_: next(perplexities))
    options = ["--refit", "--sequences", "12", "--rows-from", "all", "--f", "2"]
    try:
        assert prune(root, *options, model="gated", out=out) == 0
    finally:
        os.umask(previous)
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o640}
    (entry,) = json.loads((out / "statecut.json").read_text())
    assert entry["base"] == {"name": "gated", "digest": Checkpoint(root / "gated").digest()}
    cut = entry["cut"]
    assert (cut["method"], cut["keys"], cut["values"]) == ("drrqr", [8, 16], [24, 24])
    assert cut["eps"] == [1e-6, 2e-6]
    assert torch.tensor(cut["kept"]["keys"]).shape == (2, 2, 8)
    assert cut["calibration"]["text"]["revision"].startswith("sha256:")
    models = entry["measured"]["models"]
    assert [*models] == ["unpruned", "cut", "refitted"]
    assert entry["measured"]["tokens"] == 80
    card = (out / "README.md").read_text()
    for name, number in models["unpruned"].items():
        shown = f"{number:.2f}" if name == "perplexity" else f"{number:,}"
        assert f"| {name.replace('_', ' ')} | {shown} |" in card
    assert "- f: 2.0\n" in card
    (command,) = re.findall("^    (statecut prune .*)$", card, re.MULTILINE)
    again = shlex.split(command)[1:]
    again[again.index(str(out))] = str(tmp_path / "again")
    assert main(again) == 0
    both = (tmp_path / name / "model.safetensors" for name in ("told", "again"))
    assert next(both).read_bytes() == next(both).read_bytes()


def test_the_default_is_fisher_with_refit_rounded_to_what_kernels_like(
    root, tmp_path, capsys, monkeypatch
):
    """And of a large model, whose gradients take much memory, DRRQR."""
    arguments = ["prune", root / "wide", tmp_path / "out", "--ratio", "0.6", "--text",
                 root / "text.jsonl", "--sequences", "12", "--length", "40"]  # fmt: skip
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"method +fisher \(default\)", shown)
    assert "32 of 48 (19 asked, rounded up; --round-to 1 keeps 19)" in shown
    assert "refitted" in shown
    assert run(*arguments, "--round-to", "1", "--force") == 0
    assert re.search(r"key channels per head +19 of 48\n", capsys.readouterr().out)
    monkeypatch.setattr("statecut.pruning.request.FISHER_UP_TO", 1000)
    options = {"f": 2.0, "rows": "all"}
    request = Request(
        root / "gated", tmp_path / "new", ratio=0.5, text=root / "text.jsonl", options=options
    )
    assert request.plan().method.name == "drrqr"
    assert request.command().endswith(" --f 2.0 --rows-from all")


def test_a_type_that_is_asked_for_or_that_the_kernel_takes_is_written(root, tmp_path):
    for dtype in ("float32", "float16"):
        assert prune(root, "--dtype", dtype, "--method", "l1", out=tmp_path / dtype) == 0
        assert load(tmp_path / dtype).dtype == getattr(torch, dtype)
    narrower = tmp_path / "narrower"
    assert without_text(tmp_path / "float16", narrower, "--no-refit", "--ratio", "0.6") == 0
    assert load(narrower).dtype == torch.float16


def test_force_replaces_a_model_and_nothing_else(root, tmp_path, capsys, monkeypatch):
    shutil.copytree(root / "delta_net", tmp_path / "other" / "model")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "notes.txt").touch()
    (tmp_path / "papers" / "config.json").touch()
    for folder in ("empty", "here", "mounted"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("empty")
    there = sorted(tmp_path.rglob("*"))
    for out, options, message in (
        ("other/model", ["--force"], "other/model would be lost"),
        ("other", ["--force"], "other/model would be lost"),
        ("papers", [], "papers exists and is not a model directory; --force only replaces"),
        ("papers", ["--force"], "papers exists and is not a model directory; --force only"),
        ("link", ["--force"], "link is not a folder: give another name"),
        ("linked", [], "linked exists and is not a model"),
        ("other/model/smaller", [], "lies in the model's own folder"),
        ("papers/notes.txt/out", [], "cannot be written"),
        ("here", [], "is the working folder or a mount point: give a folder in it"),
        ("mounted", [], "is the working folder or a mount point: give a folder in it"),
    ):
        model = tmp_path / "other" / "model"
        assert prune(root, "--method", "l1", *options, model=model, out=tmp_path / out) == 2
        assert message in stderr(capsys)
    assert sorted(tmp_path.rglob("*")) == there
    out = tmp_path / "out"
    assert prune(root, out=out) == 0
    before = (out / "model.safetensors").read_bytes()
    narrower = ["--ratio", "0.75", "--round-to", "1"]
    assert prune(root, *narrower, out=out) == 2
    assert "exists already; give --force to replace it" in stderr(capsys)
    assert (out / "model.safetensors").read_bytes() == before
    assert prune(root, *narrower, "--force", out=out) == 0
    assert load(out).model.layers[0].attn.head_k_dim == 4


def test_an_empty_folder_is_nothing_to_lose_but_what_comes_into_it_is(root, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert without_text(root / "delta_net", out, "--no-refit") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(out)
    out.mkdir()

    def write():
        with atomic_write(out, folder=True):
            (out / "notes.txt").touch()

    with pytest.raises(InputError, match=r"out cannot be put in place: .* not empty") as caught:
        write()
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert Path(str(caught.value).split("kept as ")[1]).is_dir()


def test_l1_needs_no_text(root, tmp_path, capsys):
    assert without_text(root / "gated", tmp_path / "out", "--no-refit") == 0
    assert "Perplexity was not measured." in capsys.readouterr().out
    assert without_text(root / "gated", tmp_path / "out", "--force") == 2
    assert "the refit needs text: give --text FILE" in stderr(capsys)


@pytest.mark.parametrize(("document", "blocks"), [("README.md", 1), ("docs/guide/python.md", 3)])
def test_pruning_from_python_as_documented(root, tmp_path, monkeypatch, document, blocks):
    (tmp_path / "model").symlink_to(root / "delta_net")
    for text in ("corpus.jsonl", "held_out.jsonl"):
        (tmp_path / text).symlink_to(root / "text.jsonl")
    monkeypatch.chdir(tmp_path)
    names = {}
    few = {"path/to/model": "model", "jsonl.xz": "jsonl", "=128, length=2048": "=16, length=40",
           'jsonl")  #': 'jsonl", sequences=16, length=40)  #'}  # fmt: skip
    for block in readme.python_blocks(document)[:blocks]:
        for long, short in few.items():
            block = block.replace(long, short)
        exec(block, names)
    attention = names["smaller"].model.layers[0].attn
    assert (attention.head_k_dim, attention.head_v_dim) == (8, 8 if "guide" in document else 16)


BAD = [
    (["--ratio", "0"], "--ratio 0: must lie in (0, 1), the share"),
    (["--length", "1"], "--length 1: must be 2 or more"),
    (["--ratio", "nan"], "ratio nan: must lie in (0, 1)"),
    (["--ratio", "0.99"], "ratio 0.99 leaves no channel of 16"),
    (["--round-to", "16"], "--round-to 16 leaves all 16 channels"),
    (["--method", "drqr"], "did you mean 'drrqr'?"),
    (["--sequences", "9000"], "sequences of 40 tokens, 9016 are needed"),
    (["--sequences", "0"], "--sequences 0: must be 1 or more"),
    (["--device", "cuda"], "--device cuda: give cpu, there is no GPU"),
    (["--seed", "-1"], "--seed -1: must lie between 0 and 92233"),
    (
        ["--refit", "--length", "5"],
        "25 tokens of text (one sequence of 8 is held out) for the 48 unknowns that each output",
    ),
    (["--text", "empty.txt"], "empty.txt: the file is empty"),
    ({"model": "nowhere"}, "no such folder"),
    ({"model": "bare"}, "bare: no tokenizer.json: copy it and tokenizer_config.json from"),
    ({"model": "few"}, "has 270 ids, the model's vocab_size is 97"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_values_are_named_and_nothing_is_written(
    root, tmp_path, capsys, monkeypatch, given, message
):
    monkeypatch.setattr("statecut.pruning.calibration.calibrate", None)
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    if given in ({"model": "bare"}, {"model": "few"}):
        given = {"model": tmp_path / given["model"]}
        tokenizer = root / "tokenizer" if given["model"].name == "few" else None
        save(create(SMALL["gated"], seed=1), given["model"], tokenizer=tokenizer)
    more, folders = (given, {}) if isinstance(given, list) else ([], given)
    assert prune(root, *more, **folders, out=tmp_path / "bad") == 2
    line = stderr(capsys).splitlines()[-1]
    assert line.startswith("statecut: ")
    assert message in line
    assert not Path("bad").exists()


@pytest.mark.parametrize("method", ["drrqr", "fisher"])
def test_a_hybrid_of_transformers_is_cut_and_refitted(root, tmp_path, capsys, method):
    head = {"mtp.norm.weight": torch.randn(3)}
    model = rewritten(root / "qwen3_5_tied", tmp_path / "model", lambda t: t.update(head))
    options = ["--method", method, "--refit", "--sequences", "9"]
    assert prune(root, *options, model=model, out=tmp_path / "out") == 0
    message = capsys.readouterr()
    assert re.search(r"copied as they are +1 tensors \(mtp\.\)", message.out)
    assert re.search("key channels per head +8 of 16", message.out)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["mtp.norm.weight"], head["mtp.norm.weight"])
    assert logits(load(tmp_path / "out"), torch.arange(9)[None]).isfinite().all()


def test_a_hybrid_of_fla_is_cut_and_not_run(root, tmp_path, capsys):
    """Its softmax layers need flash-attn: said before anything is read, loaded or packed."""
    softmax = {"layers": [1], "num_heads": 2}
    model, out = rewritten(root / "delta_net", tmp_path / "hybrid", attn=softmax), tmp_path / "out"
    assert prune(root, model=model, out=out) == without_text(model, out) == 2
    assert stderr(capsys).count("can cut such a model without text: --method l1 --no-refit") == 2
    assert without_text(model, out, "--no-refit") == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert [len(tensors[f"model.layers.{i}.attn.q_proj.weight"]) for i in range(2)] == [16, 32]


def test_force_replaces_packed_text_and_nothing_else(root, tmp_path, capsys):
    text = tmp_path / "corpus" / "text.jsonl"
    for folder in ("corpus", "papers"):
        (tmp_path / folder).mkdir()
        shutil.copy(root / "text.jsonl", tmp_path / folder / "text.jsonl")

    def pack(out):
        options = ["--tokenizer", root / "tokenizer", "--length", "32", "--force"]
        return run("pack", text, out, *options)

    assert pack(text.parent) == 2
    assert "text.jsonl would be lost" in stderr(capsys)
    assert pack(tmp_path / "papers") == 2
    assert "papers exists and is not a packed text directory" in stderr(capsys)
    assert text.exists()
    assert pack(tmp_path / "packed") == pack(tmp_path / "packed") == 0
    assert "sequences" in capsys.readouterr().out


def test_importing_statecut_imports_nothing_slow():
    code = (
        "import sys, statecut, statecut.cli, reproduction.config, statecut.models.architectures;"
        "slow = {'torch', 'fla', 'transformers', 'numpy', 'lm_eval'} & {*sys.modules};"
        "print(sorted(slow))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_progress_is_shown_where_it_is_logged(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("statecut.data.progress.REDRAWN", 0)
    for level, shown in ((logging.WARNING, False), (logging.INFO, True)):
        monkeypatch.setattr(logging.getLogger("statecut"), "level", level)
        logging.getLogger("statecut").manager._clear_cache()
        Progress("work").add(tokens=1)
        assert ("work: 1 tokens" in capsys.readouterr().err) == shown


def test_what_the_library_logs_reaches_stderr_once_as_it_is(capsys):
    logs.start()
    logs.start()
    logging.getLogger("statecut.pruning.prune").info("selecting: %s", "l1")
    logging.getLogger("other").info("never shown")
    assert capsys.readouterr() == ("", "selecting: l1\n")


def test_a_missing_parameter_is_named_before_any_work(root, tmp_path, capsys):
    tensor = "model.layers.1.mlp.up_proj.weight"
    model = rewritten(root / "gated", tmp_path / "model", lambda tensors: tensors.pop(tensor))
    for options in (["--method", "drrqr"], ["--method", "l1", "--refit"]):
        assert prune(root, *options, model=model, out=tmp_path / "out") == 2
        shown = stderr(capsys)
        assert f'Missing key(s) in state_dict: "{tensor}"' in shown
        assert not re.search("calibrating|slicing", shown)
