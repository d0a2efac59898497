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
from small_models import SMALL
from test_cli import sentences

from reproduction.config import load_config
from reproduction.new_tokenizers import train_tokenizer
from statecut.cli import main
from statecut.errors import InputError
from statecut.models import create, load, save
from statecut.models.checkpoint import Checkpoint
from statecut.preflight import ShapeVerdict
from statecut.pruning.slicing import cut_back, slice_model
from statecut.record import Record
from statecut.recovery import recover as command
from statecut.recovery.checkpoints import CURVE
from statecut.recovery.loop import EXIT_UNFINISHED
from statecut.recovery.request import RecoveryRequest


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A model with a tokenizer that fits it, what is left of it after a cut, others, and text."""
    root = tmp_path_factory.mktemp("recover")
    train_tokenizer(sentences(60), root / "tokenizer", vocabulary_size=270)
    small = {**SMALL["delta_net"], "vocab_size": 270}
    for name, config, seed in (
        ("teacher", small, 1),
        ("another", small, 2),
        ("larger", {**small, "intermediate_size": 64}, 1),
    ):
        save(create(config, seed=seed), root / name, tokenizer=root / "tokenizer")
    teacher = Checkpoint(root / "teacher")
    slice_model(teacher, cut_back(teacher.shape, 8), root / "student", dtype=None)
    (root / "text.txt").write_text("\n\n\n".join(sentences(400)))
    return root


def recover(root, *more, model="student", teacher="teacher", out="out"):
    arguments = ["recover", root / model, root / teacher, root / out, "--text", root / "text.txt",
                 "--steps", "4", "--batch", "2", "--length", "24", *more]  # fmt: skip
    return main([str(argument) for argument in arguments])


def stderr(capsys):
    return capsys.readouterr().err.strip()


def test_a_hybrid_is_recovered(workplace, capsys):
    config = {**SMALL["qwen3_5_tied"], "vocab_size": 270}
    save(create(config, seed=1), workplace / "hybrid", tokenizer=workplace / "tokenizer")
    hybrid = Checkpoint(workplace / "hybrid")
    slice_model(hybrid, cut_back(hybrid.shape, 8), workplace / "narrow", dtype=None)
    assert recover(workplace, model="narrow", teacher="hybrid", out="wider") == 0
    before, after = (Checkpoint(workplace / name) for name in ("narrow", "wider"))
    assert after.shape == before.shape
    changed = {
        name for name, tensor in after.tensors() if not torch.equal(tensor, before.tensor(name))
    }
    assert "WARNING: mlx-lm computes d_k 8 wrong on a Mac's GPU" in capsys.readouterr().out
    mixers = [f"model.layers.{layer}.linear_attn." for layer in (0, 2)]
    assert changed == {f"{at}{name}.weight" for at in mixers for name in ("in_proj_qkv", "conv1d")}


def test_a_recovered_model_is_written_with_its_card_and_curve(workplace, capsys):
    assert recover(workplace) == 0
    shown = capsys.readouterr()
    assert re.search(r"unpruned +pruned +recovered\nperplexity +\d+\.\d\d +\d+\.\d\d +", shown.out)
    assert "Perplexity of 24 tokens held out of text.txt." in shown.out
    assert "4 steps of 2 x 24 tokens of text.txt" in shown.out
    out = workplace / "out"
    assert load(out)(torch.arange(9)[None]).logits.isfinite().all()
    assert (out / "tokenizer.json").is_file()
    assert len((out / CURVE).read_text().splitlines()) == 5
    # Nothing but what learns has changed, and that has.
    before, after = (load_file(f / "model.safetensors") for f in (workplace / "student", out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if re.search(r"attn\.[qkv]_(proj|conv1d)", n)}
    card = (out / "README.md").read_text()
    assert "- recovery: 4 steps of 2 x 24 tokens of text.txt\n" in card
    assert re.search(r"\| perplexity \| \d+\.\d\d \| \d+\.\d\d \| \d+\.\d\d \|", card)
    folders = [str(workplace / name) for name in ("student", "teacher", "out")]
    assert (
        f"    statecut recover {' '.join(folders)} --text {workplace / 'text.txt'} --steps 4"
        in card
    )
    assert not (workplace / "out.checkpoints").exists()


def test_the_record_has_the_cut_and_the_recovery(workplace, capsys):
    text = ["--text", str(workplace / "text.txt"), "--sequences", "9", "--length", "24"]
    cut = ["--ratio", "0.6", "--method", "l1", "--round-to", "8", *text]
    assert main(["prune", str(workplace / "teacher"), str(workplace / "cut"), *cut]) == 0
    assert recover(workplace, model="cut", out="recovered") == 0
    first, second = Record.read(workplace / "recovered").entries
    assert first["cut"]["keys"] == [8, 16]
    assert second["recovery"]["teacher digest"] == first["base"]["digest"]
    assert [*second["measured"]["models"]] == ["unpruned", "pruned", "recovered"]
    card = (workplace / "recovered" / "README.md").read_text()
    assert "- before: 8 of 16 key channels per head kept by l1\n" in card
    # The record knows which model it was cut from: one with the same embeddings is another.
    model = load(workplace / "teacher")
    model.model.layers[0].attn.q_proj.weight.data[0] += 1
    save(model, workplace / "alike", tokenizer=workplace / "tokenizer")
    capsys.readouterr()
    assert recover(workplace, model="cut", teacher="alike", out="bad") == 2
    assert "alike is not the model that" in stderr(capsys)


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_bits(workplace, capsys, monkeypatch):
    assert recover(workplace, out="unbroken") == 0
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time()))  # stops after a step, as a kill may
    with pytest.raises(SystemExit) as stopped:
        recover(workplace, out="stopped")
    assert stopped.value.code == EXIT_UNFINISHED
    assert not (workplace / "stopped").exists()
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    capsys.readouterr()
    assert recover(workplace, out="stopped") == 0
    assert "recovery: resumes from step 1" in stderr(capsys)
    first, second = (
        (workplace / out / "model.safetensors").read_bytes() for out in ("unbroken", "stopped")
    )
    assert first == second
    assert not (workplace / "stopped.checkpoints").exists()


def test_defaults_are_the_papers(workplace):
    request = RecoveryRequest(workplace / "student", workplace / "teacher", "out", text="corpus")
    paper = load_config(readme.ROOT / "config/paper.yaml").recovery.settings()
    assert paper.lora.modules == Checkpoint(workplace / "student").architecture.projections
    lora = replace(paper.lora, modules=None)
    assert request.settings == replace(paper, data="corpus", lora=lora)
    assert request.length == 2048


BAD = {
    "a teacher with other weights": (
        {"teacher": "another"}, [], "another is not the model that .*student was cut from"),
    "a teacher of another shape": (
        {"teacher": "larger"}, [], "larger is not the model that .*student was cut from"),
    "model and teacher exchanged": (
        {"model": "teacher", "teacher": "student"}, [], "give the pruned model first"),
    "a model that was never cut": ({"model": "teacher"}, [], "give the pruned model first"),
    "a model that is not there": ({"model": "nowhere"}, [], "no such folder"),
    "a folder that exists": ({"out": "another"}, [], "exists already; give --force"),
    "the teacher's folder": ({"out": "teacher"}, ["--force"], "teacher would be lost"),
    "a folder in the teacher's": ({"out": "teacher/new"}, [], "lies in the model's own folder"),
    "one token": ({}, ["--length", "1"], "--length 1: must be 2 or more"),
    "no steps": ({}, ["--steps", "0"], "--steps 0: must be 1 or more"),
    "steps that do not divide": (
        {}, ["--gradient-accumulation-steps", "2", "--batch", "3"],
        "--gradient-accumulation-steps 2: must divide --batch 3"),
    "no learning rate": ({}, ["--learning-rate", "nan"], "--learning-rate nan: must be a number"),
    "a seed below zero": ({}, ["--seed", "-1"], "--seed -1: must lie between"),
    "no GPU": ({}, ["--device", "cuda"], "--device cuda: give cpu, there is no GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_is_wrong_is_refused_before_any_work(workplace, capsys, monkeypatch, case):
    monkeypatch.setattr(command, "pack_text", None)
    folders, arguments, message = BAD[case]
    before = sorted(workplace.rglob("*"))
    assert recover(workplace, *arguments, **{"out": "bad", **folders}) == 2
    assert re.search(message, stderr(capsys))
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.parametrize(
    ("out", "text", "message"),
    [
        ("another", "text.txt", "another exists already; give --force"),
        ("text.txt", "text.txt", "text.txt would be lost"),
        ("new", "nowhere.txt", "nowhere.txt: no such file or folder"),
    ],
)
def test_no_model_is_read_before_output_and_text_are_checked(
    workplace, capsys, monkeypatch, out, text, message
):
    monkeypatch.setattr(command, "Checkpoint", None)
    assert recover(workplace, "--text", workplace / text, out=out) == 2
    assert message in stderr(capsys)


def test_a_file_in_the_place_of_checkpoints_is_refused_before_any_work(
    workplace, capsys, monkeypatch
):
    monkeypatch.setattr(command, "Checkpoint", None)
    (workplace / "new.checkpoints").touch()
    assert recover(workplace, out="new") == 2
    assert "new.checkpoints is not a folder: give another name" in stderr(capsys)
    (workplace / "new.checkpoints").unlink()


def test_a_recovery_that_is_killed_before_it_trains_leaves_nothing(
    workplace, tmp_path, capsys, monkeypatch
):
    before = sorted(workplace.rglob("*"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(command, "pack_text", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert recover(workplace, out="killed") == 130
    assert stderr(capsys) == "statecut: interrupted"
    assert not list(tmp_path.iterdir())
    assert sorted(workplace.rglob("*")) == before


def test_too_little_text_is_refused_and_more_epochs_need_less(workplace, capsys):
    many = ["--steps", "20000", "--batch", "2", "--length", "24"]
    assert recover(workplace, *many, out="bad") == 2
    assert "sequences of 24 tokens, 40016 are needed; give more text" in stderr(capsys)
    assert not (workplace / "bad.checkpoints").exists()
    assert recover(workplace, "--epochs", "4", out="epochs") == 0
    assert "text: sequences of 24 tokens, 2 for recovery, 1 for held out" in stderr(capsys)


def test_a_width_that_a_gpu_does_not_train_is_padded_or_refused(workplace, monkeypatch):
    student = Checkpoint(workplace / "student")

    def verdict(shapes):
        (shape,) = shapes
        assert shape.name == "delta_net-2x8-2x16"
        return [ShapeVerdict(shape, "crashes", padded_to=padded_to, reason="it hangs")]

    monkeypatch.setattr(command, "check_shapes", verdict)
    padded_to = 16
    assert command.trainable_width(student) == 16
    padded_to = None
    with pytest.raises(InputError, match="cannot be trained on this GPU: it hangs"):
        command.trainable_width(student)
