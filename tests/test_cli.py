"""The command line as a user meets it: what works, and what it says when something is wrong."""

import errno
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import readme
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_models import SMALL
from training_runs import sentences

from reproduction.new_tokenizers import train_tokenizer
from statecut.cli import main
from statecut.errors import InputError
from statecut.files import atomic_write
from statecut.models import create, load, save
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate_layerwise
from statecut.pruning.methods import METHODS
from statecut.pruning.request import Request


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A model with a tokenizer that fits it, and text."""
    root = tmp_path_factory.mktemp("cli")
    train_tokenizer(sentences(60), root / "tokenizer", vocabulary_size=270)
    for name in ("delta_net", "gated", "shared_head", "qwen3_5_tied"):
        model = create({**SMALL[name], "vocab_size": 270}, seed=1)
        save(model, root / name, tokenizer=root / "tokenizer")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sentences(400))
    (root / "text.jsonl").write_text(lines)
    return root


def prune(root, *more, model="delta_net", out="out", text="text.jsonl"):
    """The cut alone, by DRRQR, unless `more` says otherwise."""
    arguments = ["prune", root / model, root / out, "--ratio", "0.5", "--text", root / text,
                 "--sequences", "6", "--length", "40", "--rows", "100", "--method", "drrqr",
                 "--no-refit", *more]  # fmt: skip
    return main([str(argument) for argument in arguments])


def measured(monkeypatch, *perplexities):
    """What is measured, in this order: the models have random weights."""
    values = iter(perplexities)
    monkeypatch.setattr("statecut.pruning.prune.measure", lambda *_: next(values))


def stderr(capsys):
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("name", ["delta_net", "gated", "shared_head"])
def test_prune_writes_a_smaller_model_with_a_card(workplace, capsys, name):
    out = f"{name}-out"
    assert prune(workplace, model=name, out=out) == 0
    model = load(workplace / out)
    assert model.model.layers[0].attn.head_k_dim == 8
    # DeltaNet's kernel takes no float32; the other keeps it.
    assert model.dtype == (torch.float32 if name == "gated" else torch.bfloat16)
    assert model(torch.arange(9)[None]).logits.isfinite().all()
    card = (workplace / out / "README.md").read_text()
    assert f"base_model: {name}" in card
    assert "8 of 16" in card
    newer = "Loads with flash-linear-attention 0.2.2 or newer:\n\n    import fla.models\n"
    assert (newer in card) == (name != "shared_head")
    cpu = "The kernels of flash-linear-attention need a GPU. On a CPU, in plain PyTorch:"
    assert f'{cpu}\n\n    import statecut\n    model = statecut.load("{out}")\n' in card
    assert (workplace / out / "tokenizer.json").is_file()
    shown = capsys.readouterr()
    for line in ("key channels per head +8 of 16", "condition of keys", "swaps of keys",
                 r"perplexity +[\d,.]+ +[\d,.]+\n", "cache bytes per request"):  # fmt: skip
        assert re.search(line, shown.out)
    assert "selecting: drrqr keeps 8 of 16 key channels per head" in shown.err
    assert ("as bfloat16: DeltaNet's kernel refuses" in shown.err) == (name != "gated")


def test_out_says_what_it_is(workplace, monkeypatch):
    previous = os.umask(0o027)
    try:
        measured(monkeypatch, 10.0, 12.0, 11.0)
        assert prune(workplace, "--refit", "--sequences", "12", model="gated", out="told") == 0
    finally:
        os.umask(previous)
    out = workplace / "told"
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {0o640}
    (entry,) = json.loads((out / "statecut.json").read_text())
    assert entry["base"] == {"name": "gated", "digest": Checkpoint(workplace / "gated").digest()}
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
    # The command in the card makes the same model again.
    (command,) = re.findall("^    (statecut prune .*)$", card, re.MULTILINE)
    again = shlex.split(command)[1:]
    again[again.index(str(out))] = str(workplace / "again")
    measured(monkeypatch, 10.0, 12.0, 11.0)
    assert main(again) == 0
    weights = [workplace / name / "model.safetensors" for name in ("told", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_default_is_fisher_with_refit_rounded_to_what_kernels_like(workplace, capsys):
    arguments = ["prune", workplace / "wide", workplace / "default", "--ratio", "0.6", "--text",
                 workplace / "text.jsonl", "--sequences", "12", "--length", "40"]  # fmt: skip
    wide = {**SMALL["gated"], "vocab_size": 270, "head_dim": 48, "expand_v": 0.5}
    save(create(wide, seed=1), workplace / "wide", tokenizer=workplace / "tokenizer")
    assert main([str(argument) for argument in arguments]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"method +fisher \(default\)", shown)
    assert "32 of 48 (19 asked, rounded up; --round-to 1 keeps 19)" in shown
    assert "refitted" in shown
    assert main([*map(str, arguments), "--round-to", "1", "--force"]) == 0
    assert re.search(r"key channels per head +19 of 48\n", capsys.readouterr().out)


def test_a_large_model_is_not_cut_by_gradients(workplace, monkeypatch):
    monkeypatch.setattr("statecut.pruning.request.FISHER_UP_TO", 1000)
    request = Request(
        workplace / "gated", workplace / "new", ratio=0.5, text=workplace / "text.jsonl"
    )
    assert request.plan().method.name == "drrqr"


def test_a_refit_that_does_not_help_is_left_out(workplace, capsys, monkeypatch):
    measured(monkeypatch, 10.0, 12.0, 12.5)
    assert prune(workplace, "--refit", "--sequences", "12", model="gated", out="unhelpful") == 0
    shown = capsys.readouterr().out
    assert (
        "WARNING: the refit did not lower the perplexity of the text held out, so the cut" in shown
    )
    measured(monkeypatch, 10.0, 12.0)
    assert prune(workplace, "--sequences", "12", model="gated", out="cut-alone") == 0
    weights = [workplace / name / "model.safetensors" for name in ("unhelpful", "cut-alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_type_that_is_asked_for_is_written(workplace, capsys):
    for dtype in ("float32", "float16"):
        assert prune(workplace, "--dtype", dtype, "--method", "l1", out=dtype) == 0
        assert "bfloat16" not in stderr(capsys)
        assert load(workplace / dtype).dtype == getattr(torch, dtype)
    # One that the kernel takes is kept.
    assert prune(workplace, "--ratio", "0.6", "--method", "l1", model="float16", out="kept16") == 0
    assert load(workplace / "kept16").dtype == torch.float16


def test_too_few_rows_are_said_where_channels_had_to_be_filled_up(workplace, capsys):
    assert prune(workplace, "--rows", "2", out="few-rows") == 0
    assert "WARNING: in 4 of 4 heads the sampled rows have fewer" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["drrqr", "grad"])
def test_on_a_gpu_it_calibrates_in_bf16(workplace, monkeypatch, capsys, method):
    """DeltaNet's kernel there takes nothing wider, whatever the model is saved in. The whole model
    is loaded only where a method needs gradients."""
    calls = []

    def on_cpu(call):
        def on_gpu(*args, device, dtype, **kwargs):
            calls.append((call, device, dtype))
            return call(*args, dtype=dtype, **kwargs)

        return on_gpu

    monkeypatch.setattr("statecut.pruning.calibration.load", on_cpu(load))
    monkeypatch.setattr(
        "statecut.pruning.calibration.calibrate_layerwise", on_cpu(calibrate_layerwise)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    measured(monkeypatch, 10.0, 12.0)
    arguments = ["--device", "cuda", "--method", method]
    assert prune(workplace, *arguments, out=f"on-gpu-{method}") == 0
    expected = load if method == "grad" else calibrate_layerwise
    assert calls == [(expected, "cuda", torch.bfloat16)]
    assert f"calibrating {workplace / 'delta_net'} on cuda" in capsys.readouterr().err


def test_force_replaces_a_model_and_nothing_else(workplace, capsys):
    other = workplace / "other" / "model"
    save(create({**SMALL["delta_net"], "vocab_size": 270}, seed=1), other,
         tokenizer=workplace / "tokenizer")  # fmt: skip
    for out in ("other/model", "other"):
        assert prune(workplace, "--force", model="other/model", out=out) == 2
        assert "other/model would be lost" in stderr(capsys)
    (workplace / "papers").mkdir()
    (workplace / "papers" / "notes.txt").touch()
    for force in ([], ["--force"]):  # which is not advised where it would be refused
        assert prune(workplace, *force, out="papers") == 2
        assert "papers exists and is not a model directory; --force only replaces" in stderr(capsys)
    assert load(other)


@pytest.mark.parametrize("options", [[], ["--force"], ["--refit"]])
def test_an_empty_folder_is_nothing_to_lose(workplace, tmp_path, options):
    (tmp_path / "out").mkdir()
    assert prune(workplace, "--method", "l1", *options, out=tmp_path / "out") == 0
    assert load(tmp_path / "out").model.layers[0].attn.head_k_dim == 8
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_comes_into_an_empty_folder_meanwhile_is_not_lost(tmp_path):
    out = tmp_path / "out"
    out.mkdir()

    def write():
        with atomic_write(out, folder=True):
            (out / "notes.txt").touch()

    with pytest.raises(InputError, match=r"out cannot be put in place: .* not empty") as caught:
        write()
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert Path(str(caught.value).split("kept as ")[1]).is_dir()


def test_a_folder_that_cannot_be_renamed_is_refused_before_any_work(
    workplace, tmp_path, capsys, monkeypatch
):
    for name in ("here", "mounted", "linked"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    (tmp_path / "link").symlink_to("linked")
    message = "is the working folder or a mount point: give a folder in it"
    for out in (Path(), tmp_path / "here", tmp_path / "mounted"):
        arguments = ["prune", workplace / "delta_net", out, "--ratio", "0.5", "--method", "l1"]
        assert main([*map(str, arguments), "--no-refit"]) == 2
        assert stderr(capsys) == f"statecut: {out} {message}"
    assert prune(workplace, "--method", "l1", out=tmp_path / "link") == 2
    assert "link exists and is not a model" in stderr(capsys)


def test_a_seed_makes_the_same_model_twice(workplace):
    for out in ("first", "second"):
        assert prune(workplace, "--method", "rand", "--seed", "5", out=out) == 0
    first, second = (
        load_file(workplace / out / "model.safetensors") for out in ("first", "second")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_link_to_nowhere_is_refused_before_any_work(workplace, capsys):
    link = workplace / "link"
    link.symlink_to("nowhere")
    for force in ([], ["--force"]):
        assert prune(workplace, "--method", "l1", *force, out="link") == 2
        assert "link is not a folder: give another name" in stderr(capsys)
    link.unlink()
    assert not list(workplace.glob(".*"))


def test_l1_needs_no_text(workplace, capsys):
    arguments = ["prune", workplace / "gated", workplace / "l1", "--ratio", "0.5", "--method", "l1"]
    assert main([*map(str, arguments), "--no-refit"]) == 0
    assert "Perplexity was not measured." in capsys.readouterr().out
    assert main([*map(str, arguments), "--force"]) == 2
    message = stderr(capsys)
    assert "the refit needs text: give --text FILE" in message
    assert message.endswith("--method l1 --no-refit needs none")


def test_out_that_exists_is_refused_and_kept(workplace, capsys):
    assert prune(workplace, out="kept") == 0
    before = (workplace / "kept" / "model.safetensors").read_bytes()
    assert prune(workplace, "--ratio", "0.75", out="kept") == 2
    assert "exists already; give --force to replace it" in stderr(capsys)
    assert (workplace / "kept" / "model.safetensors").read_bytes() == before
    assert prune(workplace, "--ratio", "0.75", "--round-to", "1", "--force", out="kept") == 0
    assert load(workplace / "kept").model.layers[0].attn.head_k_dim == 4


def test_the_readmes_method_is_one_like_the_others(workplace, capsys, monkeypatch, tmp_path):
    (tmp_path / "ghost.py").write_text(readme.method_file())
    monkeypatch.syspath_prepend(tmp_path)
    (ghost,) = import_module("ghost").METHODS
    monkeypatch.setitem(METHODS, "ghost", ghost)
    assert prune(workplace, "--method", "ghost", out="ghost") == 0
    assert "ghost keeps 8 of 16 key channels per head" in stderr(capsys)
    assert "--method ghost" in (workplace / "ghost" / "README.md").read_text()
    assert prune(workplace, "--method", "ghost", "--target", "k", out="bad") == 2
    assert "target k: method ghost judges by kq" in stderr(capsys)


@pytest.mark.parametrize("document", ["README.md", "docs/prune.md"])
def test_pruning_from_python_as_documented(workplace, tmp_path, monkeypatch, document):
    (tmp_path / "model").symlink_to(workplace / "delta_net")
    for text in ("corpus.jsonl", "held_out.jsonl"):
        (tmp_path / text).symlink_to(workplace / "text.jsonl")
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = readme.python_blocks(document)
    few = {"path/to/model": "model", "jsonl.xz": "jsonl", "=128, length=2048": "=16, length=40",
           'jsonl")  #': 'jsonl", sequences=16, length=40)  #'}  # fmt: skip
    for block in blocks[: 1 if document == "README.md" else 2]:
        for long, short in few.items():
            block = block.replace(long, short)
        exec(block, names)
    assert names["smaller"].model.layers[0].attn.head_k_dim == 8
    assert load(tmp_path / "smaller").model.layers[0].attn.head_k_dim == 8


def test_help_has_every_method_and_option(capsys):
    with pytest.raises(SystemExit):
        main(["prune", "--help"])
    shown = capsys.readouterr().out
    for method in METHODS.values():
        assert method.about in shown
        assert all(option.flag in shown for option in method.takes)


def test_options_reach_the_method_and_the_card(workplace):
    assert prune(workplace, "--rows-from", "all", "--f", "2", out="all") == 0
    card = (workplace / "all" / "README.md").read_text()
    assert "--rows-from all --f 2.0" in card
    assert "- f: 2.0\n" in card


BAD = {
    "an option of another method": (["--method", "l1", "--f", "2"], "method l1 takes no f"),
    "a ratio outside": (["--ratio", "1.2"], "ratio 1.2: must lie in (0, 1)"),
    "a ratio that cuts none": (["--ratio", "0"], "--ratio 0: must lie in (0, 1), the share"),
    "a ratio that leaves none": (["--ratio", "0.99"], "ratio 0.99 leaves no channel of 16"),
    "a method that does not exist": (["--method", "drqr"], "did you mean 'drrqr'?"),
    "a tolerance below one": (["--f", "0.5"], "f 0.5: must be at least 1"),
    "text that is too short": (["--length", "100000"], "holds 0 sequences of 100000 tokens"),
    "text that is too little": (["--sequences", "9000"], "sequences of 40 tokens, 9016 are needed"),
    "no sequences at a time": (["--batch", "0"], "--batch 0: must be 1 or more"),
    "a GPU that is not there": (["--device", "cuda"], "--device cuda: give cpu, there is no GPU"),
    "a device that is none": (["--device", "gpu"], "--device gpu: give cpu"),
    "a ratio that is no number": (["--ratio", "nan"], "ratio nan: must lie in (0, 1)"),
    "one token": (["--length", "1"], "--length 1: must be 2 or more"),
    "no multiple": (["--round-to", "0"], "--round-to 0: must be 1 or more"),
    "no rows": (["--rows", "0"], "--rows 0: must be 1 or more"),
    "no sequences": (["--sequences", "0"], "--sequences 0: must be 1 or more"),
    "a seed below zero": (["--seed", "-1"], "--seed -1: must lie between 0 and 92233"),
    "a seed beyond 64 bits": (["--seed", "9" * 20], f"--seed {'9' * 20}: must lie between"),
    "a width rounded up to all": (["--round-to", "16"], "--round-to 16 leaves all 16 channels"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_values_are_named_and_nothing_is_written(workplace, capsys, case):
    arguments, message = BAD[case]
    assert prune(workplace, *arguments, out="bad") == 2
    line = stderr(capsys).splitlines()[-1]
    assert line.startswith("statecut: ")
    assert message in line
    assert not (workplace / "bad").exists()


def test_a_model_without_a_tokenizer_is_refused_with_what_to_copy(workplace, capsys):
    save(create(SMALL["gated"], seed=1), workplace / "bare")
    assert prune(workplace, model="bare", out="bad") == 2
    line = stderr(capsys).splitlines()[-1]
    assert "bare: no tokenizer.json: copy it and tokenizer_config.json from the original" in line
    assert not (workplace / "bad").exists()


def test_a_folder_inside_the_model_is_refused(workplace, capsys):
    assert prune(workplace, out="delta_net/smaller") == 2
    assert "lies in the model's own folder" in stderr(capsys)
    assert not (workplace / "delta_net" / "smaller").exists()


@pytest.mark.parametrize("method", ["drrqr", "fisher"])
def test_a_hybrid_of_transformers_is_cut_and_refitted(workplace, capsys, method):
    weights, out = workplace / "qwen3_5_tied" / "model.safetensors", f"hybrid-{method}"
    head = {"mtp.norm.weight": torch.randn(3)}
    save_file({**load_file(weights), **head}, weights, metadata={"format": "pt"})
    options = ["--method", method, "--refit", "--sequences", "9"]
    assert prune(workplace, *options, model="qwen3_5_tied", out=out) == 0
    message = capsys.readouterr()
    assert re.search(r"copied as they are +1 tensors \(mtp\.\)", message.out)
    assert re.search("key channels per head +8 of 16", message.out)
    tensors = load_file(workplace / out / "model.safetensors")
    assert torch.equal(tensors["mtp.norm.weight"], head["mtp.norm.weight"])
    assert "import" not in (workplace / out / "README.md").read_text().split("from transformers")[0]
    assert load(workplace / out)(torch.arange(9)[None]).logits.isfinite().all()


def test_a_hybrid_is_cut_and_not_run(workplace, capsys, monkeypatch):
    """Its softmax layers need flash-attn: said before anything is read, loaded or packed."""
    shutil.copytree(workplace / "delta_net", workplace / "hybrid")
    config = json.loads((workplace / "hybrid" / "config.json").read_text())
    config["attn"] = {"layers": [1], "num_heads": 2}
    (workplace / "hybrid" / "config.json").write_text(json.dumps(config))
    assert prune(workplace, model="hybrid", out="bad") == 2
    assert "runs no softmax attention of flash-linear-attention; it can cut" in stderr(capsys)
    arguments = ["prune", workplace / "hybrid", workplace / "hybrid-l1", "--ratio", "0.5"]
    assert main([*map(str, arguments), "--method", "l1"]) == 2
    assert "can cut such a model without text: --method l1 --no-refit" in stderr(capsys)
    assert main([*map(str, arguments), "--method", "l1", "--no-refit"]) == 0
    tensors = load_file(workplace / "hybrid-l1" / "model.safetensors")
    widths = [len(tensors[f"model.layers.{i}.attn.q_proj.weight"]) for i in range(2)]
    assert widths == [16, 32]


def test_a_disk_without_room_is_refused_before_and_explained_after(workplace, capsys, monkeypatch):
    usage = shutil.disk_usage(workplace)
    arguments = ["--method", "l1", "--dtype", "float32"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=133_887))
    assert prune(workplace, *arguments, out="bad") == 2
    assert "bad needs 133,888 bytes, and its disk has 133,887 left" in stderr(capsys)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=133_888))

    def full(*_args, **_kwargs):
        raise SafetensorError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    monkeypatch.setattr("statecut.models.checkpoint.save_file", full)
    assert prune(workplace, *arguments, out="bad") == 2
    message = stderr(capsys).splitlines()[-1]
    assert "bad: I/O error: No space left on device (os error 28): make room" in message
    assert not (workplace / "bad").exists()


def test_text_shorter_than_one_sequence_is_refused(workplace, capsys, monkeypatch):
    """Before the model is loaded."""
    monkeypatch.setattr("statecut.pruning.calibration.calibrate_layerwise", None)
    (workplace / "short.txt").write_text("four words and more")
    assert prune(workplace, out="bad", text="short.txt") == 2
    assert "sequences of 40 tokens" in stderr(capsys)


def test_an_empty_text_is_refused(workplace, capsys):
    (workplace / "empty.txt").write_text("")
    assert prune(workplace, out="bad", text="empty.txt") == 2
    assert "empty.txt: the file is empty" in stderr(capsys)


def test_a_tokenizer_too_large_for_the_model_is_refused(workplace, capsys):
    save(create(SMALL["delta_net"], seed=1), workplace / "few", tokenizer=workplace / "tokenizer")
    assert prune(workplace, model="few", out="bad") == 2
    assert "has 270 ids, the model's vocab_size is 97" in stderr(capsys)


def test_a_model_that_is_not_there_is_refused(workplace, capsys):
    assert prune(workplace, model="nowhere", out="bad") == 2
    assert "no such folder" in stderr(capsys)


def test_a_hub_name_that_was_not_downloaded_is_refused(workplace, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    assert main(["prune", "owner/name", "bad", "--ratio", "0.5"]) == 2
    message = stderr(capsys)
    assert "owner/name: no such folder; as a name on the hub: model owner/name is not in" in message


def test_a_folder_that_cannot_be_written_is_refused(workplace, capsys):
    (workplace / "file").write_text("not a folder")
    assert prune(workplace, out="file/out") == 2
    assert "cannot be written" in stderr(capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(workplace, capsys):
    closed = workplace / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert prune(workplace, out="closed/out") == 2
    assert "Permission denied" in stderr(capsys)


def test_pack_says_what_it_made(workplace, capsys):
    arguments = ["pack", workplace / "text.jsonl", workplace / "packed", "--tokenizer",
                 workplace / "tokenizer", "--length", "32"]  # fmt: skip
    assert main([str(argument) for argument in arguments]) == 0
    assert "sequences" in capsys.readouterr().out
    assert main([*map(str, arguments), "--seed", "-1", "--force"]) == 2
    assert "--seed -1: must lie between" in stderr(capsys)


@pytest.mark.parametrize("option", ["--length", "--sequences", "--workers"])
def test_pack_names_the_option_that_is_wrong(workplace, tmp_path, capsys, option):
    arguments = ["pack", workplace / "text.jsonl", tmp_path / "out", option, "0"]
    assert main([*map(str, arguments), "--tokenizer", str(workplace / "tokenizer")]) == 2
    assert stderr(capsys) == f"statecut: {option} 0: must be 1 or more"


def test_force_replaces_packed_text_and_nothing_else(workplace, tmp_path, capsys):
    text = tmp_path / "corpus" / "text.jsonl"
    text.parent.mkdir()
    text.write_bytes((workplace / "text.jsonl").read_bytes())

    def pack(out):
        arguments = ["pack", text, out, "--tokenizer", workplace / "tokenizer", "--length", "32"]
        return main([str(argument) for argument in [*arguments, "--force"]])

    assert pack(text.parent) == 2
    assert "text.jsonl would be lost" in stderr(capsys)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "notes.txt").touch()
    assert pack(tmp_path / "papers") == 2
    assert "papers exists and is not a packed text directory" in stderr(capsys)
    assert text.exists()
    assert pack(tmp_path / "packed") == pack(tmp_path / "packed") == 0


def test_importing_statecut_imports_nothing_slow():
    code = (
        "import sys, statecut, statecut.cli, reproduction.config, statecut.hub;"
        "print([m for m in ('torch', 'fla', 'transformers', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Refit


@pytest.mark.parametrize(("name", "method"), [("delta_net", "drrqr"), ("gated", "l1")])
def test_refit_changes_the_projections_and_says_what_it_brought(
    workplace, monkeypatch, name, method
):
    assert prune(workplace, "--method", method, model=name, out=f"{name}-cut") == 0
    monkeypatch.setattr("statecut.pruning.calibration.load", None)  # it is never in memory
    out = workplace / f"{name}-refitted"
    measured(monkeypatch, 10.0, 12.0, 11.0)
    assert prune(workplace, "--method", method, "--refit", model=name, out=out.name) == 0
    cut, refitted = (load_file(f / "model.safetensors") for f in (workplace / f"{name}-cut", out))
    assert cut.keys() == refitted.keys()
    changed = {n for n in cut if not torch.equal(cut[n], refitted[n])}
    fitted = ("attn.o_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in fitted}
    assert load(out)(torch.arange(9)[None]).logits.isfinite().all()

    card = (out / "README.md").read_text()
    assert "- refitted: o_proj of 2 layers and down_proj of 2 layers, on 240 tokens in " in card
    assert not list(workplace.glob(".*"))


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_parameter_is_named_before_any_work(workplace, tmp_path, capsys, tensor):
    shutil.copytree(workplace / "gated", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    for options in (["--method", "drrqr"], ["--method", "l1", "--refit"]):
        code = prune(tmp_path, *options, model="model", out="out", text=workplace / "text.jsonl")
        shown = capsys.readouterr().err
        assert code == 2
        assert f'Missing key(s) in state_dict: "{tensor}"' in shown
        assert "calibrating" not in shown
        assert "slicing" not in shown


def test_a_refit_that_fails_leaves_nothing(workplace, capsys, monkeypatch):
    def fail(*_args, **_kwargs):
        raise InputError("layer 0: NaN")

    monkeypatch.setattr("statecut.pruning.prune.refit", fail)
    assert prune(workplace, "--refit", out="bad") == 2
    assert stderr(capsys).endswith("statecut: layer 0: NaN")
    assert not (workplace / "bad").exists()
    assert not list(workplace.glob(".*"))


UNFIT = {
    "one sequence": (["--sequences", "1"], "refit: 1 sequence of text; give at least 2"),
    "too few tokens": (["--length", "5"], "25 tokens of text for the 48 unknowns that each output"),
}


@pytest.mark.parametrize("case", sorted(UNFIT))
@pytest.mark.parametrize("method", ["l1", "drrqr"])
def test_what_cannot_be_refitted_is_refused_before_any_work(
    workplace, capsys, monkeypatch, case, method
):
    monkeypatch.setattr("statecut.pruning.prune.pack_text", None)
    arguments, message = UNFIT[case]
    assert prune(workplace, "--refit", "--method", method, *arguments, out="bad") == 2
    assert message in stderr(capsys)
    assert not (workplace / "bad").exists()


def test_a_refit_needs_room_for_two_models(workplace, capsys, monkeypatch):
    usage = shutil.disk_usage(workplace)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=2 * 133_888 - 1))
    assert prune(workplace, "--refit", "--dtype", "float32", out="bad") == 2
    assert "bad needs 267,776 bytes" in stderr(capsys)


def test_text_that_is_held_out_must_be_there_too(workplace, capsys):
    packed = ["pack", workplace / "text.jsonl", workplace / "whole", "--tokenizer",
              workplace / "tokenizer", "--length", "40"]  # fmt: skip
    assert main([*map(str, packed)]) == 0
    (sequences,) = re.findall(r"([\d,]+) sequences", capsys.readouterr().out)
    sequences = sequences.replace(",", "")
    assert prune(workplace, "--refit", "--sequences", sequences, out="bad") == 2
    message = stderr(capsys)
    assert f"{int(sequences) + 16} are needed; give more text or ask for less" in message
