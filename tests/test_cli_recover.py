"""`statecut recover`: recovery of a model of one's own."""

import os
import re
import signal
import time
from dataclasses import replace

import pytest
import readme
import torch
from safetensors.torch import load_file
from small_models import SMALL, rewritten, some, workplace

from reproduction.config import load_config
from statecut.cli import main
from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint, create, save
from statecut.preflight import ShapeVerdict
from statecut.pruning.slicing import cut_back, slice_model
from statecut.record import Record
from statecut.recovery import recover as command
from statecut.recovery.checkpoints import CURVE
from statecut.recovery.loop import EXIT_UNFINISHED
from statecut.recovery.request import RecoveryRequest

HYBRIDS = [name for name in ("qwen3_5_tied", "qwen4_exp", "bailing_hybrid") if name in SMALL]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models with a tokenizer that fits them, what is left of two after a cut, and text."""
    small = SMALL["delta_net"]
    models = {"teacher": small, "larger": {**small, "intermediate_size": 64},
              **{name: SMALL[name] for name in HYBRIDS}}  # fmt: skip
    root = workplace(tmp_path_factory.mktemp("recover"), **models)
    another = create({**small, "vocab_size": 270}, seed=2)
    save(another, root / "another", tokenizer=root / "tokenizer")
    cuts = [("teacher", "student"), *((name, f"narrow_{name}") for name in HYBRIDS)]
    for name, out in cuts:
        whole = Checkpoint(root / name)
        values = some(whole.shape, 8) if whole.architecture.square else None
        slice_model(whole, cut_back(whole.shape, 8), root / out, dtype=None, values=values)
    return root


def recover(root, out, *more, model="student", teacher="teacher"):
    arguments = ["recover", root / model, root / teacher, root / out, "--text",
                 root / "text.jsonl", "--steps", "4", "--batch", "2", "--length", "24",
                 *more]  # fmt: skip
    return main([str(argument) for argument in arguments])


def stderr(capsys):
    return capsys.readouterr().err.strip()


def changed(before, after):
    before, after = (load_file(folder / "model.safetensors") for folder in (before, after))
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_is_recovered(root, tmp_path, name):
    narrow = root / f"narrow_{name}"
    assert recover(root, tmp_path / "out", model=narrow, teacher=name) == 0
    assert Checkpoint(tmp_path / "out").shape == Checkpoint(narrow).shape
    mixer, names = "linear_attn", ["in_proj_qkv", "conv1d"]
    if name == "bailing_hybrid":
        mixer, names = "attention", [f"{x}_{part}" for x in "qkv" for part in ("proj", "conv1d")]
    learned = {f"model.layers.{layer}.{mixer}.{name}.weight" for layer in (0, 2) for name in names}
    assert changed(narrow, tmp_path / "out") == learned


def test_a_recovered_model_is_written_with_its_card_and_curve(root, tmp_path, capsys):
    out = tmp_path / "out"
    assert recover(root, out) == 0
    shown = capsys.readouterr().out
    assert re.search(r"unpruned +pruned +recovered\nperplexity +\d+\.\d\d +\d+\.\d\d +", shown)
    assert "Perplexity of 24 tokens held out of text.jsonl." in shown
    assert (out / "tokenizer.json").is_file()
    assert len((out / CURVE).read_text().splitlines()) == 5
    learned = changed(root / "student", out)
    names = load_file(out / "model.safetensors")
    assert learned == {n for n in names if re.search(r"attn\.[qkv]_(proj|conv1d)", n)}
    card = (out / "README.md").read_text()
    assert "- recovery: 4 steps of 2 x 24 tokens of text.jsonl\n" in card
    assert f"    statecut recover {root / 'student'} {root / 'teacher'} {out} --text " in card
    assert not (tmp_path / "out.checkpoints").exists()


def test_the_record_has_the_cut_and_the_recovery(root, tmp_path, capsys):
    text = ["--text", str(root / "text.jsonl"), "--sequences", "9", "--length", "24"]
    options = ["--ratio", "0.6", "--method", "l1", "--round-to", "8", *text]
    assert main(["prune", str(root / "teacher"), str(tmp_path / "cut"), *options]) == 0
    assert recover(root, tmp_path / "out", model=tmp_path / "cut") == 0
    first, second = Record.read(tmp_path / "out").entries
    assert first["cut"]["keys"] == [8, 16]
    assert second["recovery"]["teacher digest"] == first["base"]["digest"]
    assert [*second["measured"]["models"]] == ["unpruned", "pruned", "recovered"]
    # The record knows which model it was cut from: one with the same embeddings is another.
    q_proj = "model.layers.0.attn.q_proj.weight"
    alike = rewritten(root / "teacher", tmp_path / "alike", lambda t: t[q_proj][0].add_(1))
    assert recover(root, tmp_path / "bad", model=tmp_path / "cut", teacher=alike) == 2
    assert "alike is not the model that" in stderr(capsys)


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_bits(
    root, tmp_path, capsys, monkeypatch
):
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    assert recover(root, unbroken) == 0
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time()))  # stops after a step, as a kill may
    with pytest.raises(SystemExit) as ended:
        recover(root, stopped)
    assert ended.value.code == EXIT_UNFINISHED
    assert not stopped.exists()
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert recover(root, stopped) == 0
    assert "recovery: resumes from step 1" in stderr(capsys)
    assert not changed(unbroken, stopped)
    assert [path.name for path in tmp_path.glob("*.checkpoints")] == []


def test_a_run_that_is_killed_while_it_measures_goes_on_too(root, tmp_path, capsys, monkeypatch):
    perplexities = iter([10.0, 12.0])

    def measure(*_):
        return next(perplexities, None) or os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("statecut.pruning.prune.measure", measure)
        assert recover(root, tmp_path / "out") == 130
    assert not (tmp_path / "out").exists()
    assert recover(root, tmp_path / "out") == 0
    assert "recovery: resumes from step 4" in stderr(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_defaults_are_the_papers(root):
    request = RecoveryRequest(root / "student", root / "teacher", "out", text="corpus")
    paper = load_config(readme.ROOT / "config/paper.yaml").recovery.settings()
    assert paper.lora.modules == Checkpoint(root / "student").architecture.projections
    lora = replace(paper.lora, modules=None)
    assert request.settings == replace(paper, data="corpus", lora=lora)
    assert request.length == 2048


BAD = [
    ({"teacher": "another"}, [], "another is not the model that .*student was cut from"),
    ({"teacher": "larger"}, [], "larger is not the model that .*student was cut from"),
    ({"model": "teacher", "teacher": "student"}, [], "give the pruned model first"),
    ({"out": "another"}, [], "exists already; give --force"),
    ({"out": "teacher"}, ["--force"], "teacher would be lost"),
    ({"out": "text.jsonl"}, ["--force"], "text.jsonl would be lost"),
    ({"out": "teacher/new"}, [], "lies in the model's own folder"),
    ({"out": "taken"}, [], "taken.checkpoints is not a folder: give another name"),
    ({}, ["--steps", "0"], "--steps 0: must be 1 or more"),
    ({}, ["--gradient-accumulation-steps", "2", "--batch", "3"], "2: must divide --batch 3"),
    ({}, ["--learning-rate", "nan"], "--learning-rate nan: must be a number"),
]


@pytest.mark.parametrize(("folders", "arguments", "message"), BAD)
def test_what_is_wrong_is_refused_before_any_work(
    root, capsys, monkeypatch, folders, arguments, message
):
    (root / "taken.checkpoints").touch()
    monkeypatch.setattr(command, "pack_text", None)
    before = sorted(root.rglob("*"))
    assert recover(root, folders.pop("out", "bad"), *arguments, **folders) == 2
    assert re.search(message, stderr(capsys))
    assert sorted(root.rglob("*")) == before


def test_a_recovery_that_is_killed_before_it_trains_leaves_nothing(
    root, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(command, "pack_text", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert recover(root, tmp_path / "out") == 130
    assert stderr(capsys) == "statecut: interrupted"
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_refused_and_more_epochs_need_less(root, tmp_path, capsys):
    assert recover(root, tmp_path / "out", "--steps", "20000") == 2
    assert "sequences of 24 tokens, 40016 are needed; give more text" in stderr(capsys)
    assert not list(tmp_path.iterdir())
    assert recover(root, tmp_path / "out", "--epochs", "4") == 0
    assert "text: sequences of 24 tokens, 2 for recovery, 1 for held out" in stderr(capsys)


def test_a_width_that_a_gpu_does_not_train_is_padded_or_refused(root, monkeypatch):
    student, padded_to = Checkpoint(root / "student"), 16

    def verdict(shapes):
        assert [shape.name for shape in shapes] == ["delta_net-2x8-2x16"]
        return [ShapeVerdict(shapes[0], "crashes", padded_to=padded_to, reason="it hangs")]

    monkeypatch.setattr(command, "check_shapes", verdict)
    assert command.trainable_width(student) == 16
    padded_to = None
    with pytest.raises(InputError, match="cannot be trained on this GPU: it hangs"):
        command.trainable_width(student)
