"""flame through the launcher: what it is told, what it sees, and that a run goes on."""

import io
import math
import os
import signal
import sys
import tomllib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL
from test_training_survival import PROCESSES, finished, started, wait_for
from training_runs import FLAMED, LENGTH, flame_recipe, packed

from reproduction.new_tokenizers import train_tokenizer
from reproduction.pretraining import flame
from reproduction.pretraining.flame_entry import GO_ON, LEAVE, SAVE, PackedBatches, agree
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.models.checkpoint import create, load
from statecut.recovery.checkpoints import Checkpoints, Output
from statecut.recovery.loop import COLUMNS, EXIT_UNFINISHED, PATIENCE


@given(batch=st.integers(1, 64), world_size=st.integers(1, 16), gpus=st.integers(1, 20))
def test_every_gpu_has_the_same_share_or_the_number_is_refused(batch, world_size, gpus):
    recipe = flame_recipe(batch=batch, world_size=world_size)
    sequences = batch * world_size
    each = sequences // gpus
    if sequences % gpus or (each > batch and each % batch):
        assert world_size % gpus  # what divides the recipe's GPUs is never refused
        with pytest.raises(InputError, match=f"{gpus} GPUs cannot share"):
            flame.share(recipe, gpus)
        return
    at_once, accumulation = flame.share(recipe, gpus)
    assert at_once * gpus * accumulation == sequences
    assert 1 <= at_once <= batch


@settings(deadline=None, max_examples=20)
@given(world_size=st.integers(1, 8), accumulation=st.integers(1, 3), start=st.integers(0, 3))
def test_the_processes_together_see_the_batches_of_the_built_in_trainer(
    tokens, world_size, accumulation, start
):
    batch = 2
    sequences = batch * world_size * accumulation
    expected = PackedTokens(tokens).batches(sequences, seed=3, start=start)
    loaders = [
        PackedBatches(PackedTokens(tokens), 3, batch, rank, world_size)
        for rank in range(world_size)
    ]
    for loader in loaders:
        loader.load_state_dict({"sequences": torch.tensor(start * sequences)})
    going = [iter(loader) for loader in loaders]
    for _ in range(2):
        seen = [next(one)["input_ids"] for _ in range(accumulation) for one in going]
        assert torch.equal(torch.cat(seen), torch.from_numpy(next(expected)))
    states = [loader.state_dict()["sequences"] for loader in loaders]
    assert states == [(start + 2) * sequences] * world_size


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flame") / "tokens"
    packed(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flame") / "tokenizer"
    train_tokenizer(["a few words"] * 9, folder, vocabulary_size=257)
    return folder


def test_the_job_file_says_what_the_recipe_says(tmp_path, tokens, tokenizer):
    recipe = flame_recipe(learning_rate=7e-4, betas=[0.9, 0.95], weight_decay=0.2)
    output = Output(tmp_path, tmp_path, tokenizer=tokenizer, save_seconds=5)
    command = flame.write_job(tmp_path, FLAMED, tokens, recipe, output, gpus=1)
    job = tomllib.loads((tmp_path / "job.toml").read_text())
    assert job["optimizer"] == {
        "name": "AdamW", "lr": 7e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-15, "weight_decay": 0.2
    }  # fmt: skip
    assert job["lr_scheduler"] == {"warmup_steps": 3, "decay_type": "cosine", "lr_min": 0.1}
    assert job["training"].items() >= {
        "batch_size": 2, "gradient_accumulation_steps": 2, "steps": 24, "seq_len": LENGTH,
        "dataset": str(tokens), "dataset_split": "training",
    }.items()  # fmt: skip
    assert job["statecut"]["save_seconds"] == 5
    assert job["activation_checkpoint"]["mode"] == "none"  # else flame takes its own default
    assert (tmp_path / "command.txt").read_text().split() == command


@given(warmup=st.integers(0, 30), rest=st.integers(1, 60))
def test_the_rate_of_the_curve_is_flames(warmup, rest):
    recipe = flame_recipe(warmup=warmup, steps=warmup + rest)
    for step in range(1, recipe.steps + 1):
        # As torchtitan counts: from 0, with one step at the peak between rise and fall.
        if step - 1 < warmup:
            factor = step / warmup
        elif step - 1 < warmup + 1:
            factor = 1.0
        else:
            progress = (step - (warmup + 1)) / rest
            factor = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        assert flame.flame_rate(step, recipe) == pytest.approx(recipe.learning_rate * factor)


def test_a_run_told_to_stop_goes_on(tokens):
    root = tokens.parent
    # Every ten minutes, so what is there was saved for the signal, but for step 1.
    with started("flaming", root, "flamed", 1) as process:
        wait_for(root, "flamed", 3, process)
        os.kill(process.pid, signal.SIGUSR1)
    assert process.exitcode == EXIT_UNFINISHED
    assert not (root / "flamed").exists()
    saved = (root / "running" / "flamed").glob("*/flame/checkpoint/step-*")
    assert 3 <= max(int(path.name.removeprefix("step-")) for path in saved) < 24
    finished("flaming", root, "flamed", 1)

    batches = PackedTokens(tokens).batches(4, seed=0)
    expected = sum(int(next(batches).sum()) % 97 for _ in range(24)) / 1024
    weights = load(root / "flamed").state_dict()
    assert all((weight == expected).all() for weight in weights.values())
    names = {path.name for path in (root / "flamed").iterdir()}
    assert {"command.txt", "job.toml", "tokenizer.json", "README.md", "config.json"} <= names
    lines = (root / "flamed" / "loss.csv").read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert [line.split(",")[:3] for line in lines[1:]] == [
        [str(step), str(step * 4 * LENGTH), f"{round(1 / step, 4):.9g}"] for step in range(1, 25)
    ]
    assert not list((root / "running" / "flamed").iterdir())


def wishing(folder, rank, wish):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    (folder / f"agreed-{rank}").write_text(str(agree(wish)))
    dist.destroy_process_group()


def test_all_processes_leave_after_the_same_step_if_one_is_told_to(tmp_path):
    wishes = enumerate((GO_ON, LEAVE, SAVE))
    going = [PROCESSES.Process(target=wishing, args=(tmp_path, *wish)) for wish in wishes]
    for act in ("start", "join"):
        for process in going:
            getattr(process, act)()
    assert [(tmp_path / f"agreed-{rank}").read_text() for rank in range(3)] == [str(LEAVE)] * 3


def test_flame_starts_from_the_last_checkpoint_that_is_whole(tmp_path):
    for step in (9, 10, 100, 300):
        flame.checkpoint_folder(tmp_path, step).mkdir(parents=True)
        if step != 300:  # was killed
            (flame.checkpoint_folder(tmp_path, step) / ".metadata").touch()
    assert flame.last_whole(tmp_path) == 100
    left = {path.name for path in flame.checkpoint_folder(tmp_path, 0).parent.iterdir()}
    assert left == {"step-9", "step-10", "step-100"}


def log_of(steps, loss="2.5000", norm=" 1.00"):
    return "".join(
        f"[titan] - root - INFO - step: {step:2}  loss: {loss}  memory: 10.25GiB(7.00%)  "
        f"tps: 12,000  tflops: 1.00  mfu: 1.00%\n[titan] - lr: 1.0e-03 gnorm: {norm} [0:01<0:02]\n"
        for step in steps
    )


def reader():
    return flame.LogReader(flame_recipe(), step_tokens=4 * LENGTH, gpus=2, step=0)


def test_the_log_becomes_the_curve_however_it_arrives():
    text = "noise\n" + log_of(range(1, 6)) + "more noise\n"
    at_once = list(reader().rows(io.StringIO(text)))
    watch = reader()
    in_pieces = [
        row for i in range(0, len(text), 7) for row in watch.rows(io.StringIO(text[i : i + 7]))
    ]
    assert in_pieces == at_once
    assert [row.split(",")[0] for row in at_once] == list("12345")
    assert (watch.speeds[-1], watch.gibibytes) == (2 * 12_000, 10.25)


@pytest.mark.parametrize("bad", [{"loss": "nan"}, {"norm": "  inf"}])
def test_steps_that_are_not_finite_end_the_run(bad):
    watch = reader()
    text = log_of([1], **bad) + log_of([2]) + log_of(range(3, 3 + PATIENCE), **bad)
    with pytest.raises(InputError, match=f"{PATIENCE} steps in a row .* step {2 + PATIENCE}"):
        list(watch.rows(io.StringIO(text)))


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("no such kernel", r"code 3 after step 0(.|\n)*no such kernel\n$"),
        ("CUDA out of memory. GPU 0", r"of memory. GPU 0; raise `activation_checkpoint`"),
    ],
)
def test_what_flame_said_last_is_in_the_error(tmp_path, monkeypatch, printed, message):
    command = [sys.executable, "-c", f"import sys; print('{printed}'); sys.exit(3)"]
    monkeypatch.setattr(flame, "LOOK_EVERY", 0.01)
    with Checkpoints(tmp_path, {"run": 1}) as kept:
        (kept.folder / "flame.log").write_text("CUDA out of memory before\n")
        with pytest.raises(InputError, match=message):
            flame.run_flame(command, kept, reader())


def test_speed_and_memory_of_a_run_are_in_its_log(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    lines = [f"step: {n}  loss: 1.0  memory: {n}.5GiB(1%)  tps: {n},000" for n in (1, 3, 2)]
    command = [sys.executable, "-c", f"print(*{lines}, sep='\\n')"]
    monkeypatch.setattr(flame, "LOOK_EVERY", 0.01)
    with Checkpoints(tmp_path, {"run": 1}) as kept:
        last = flame.checkpoint_folder(kept.folder, flame_recipe().steps)
        last.mkdir(parents=True)
        (last / ".metadata").touch()
        flame.run_flame(command, kept, reader())
    assert "flame: 4,000 tokens/s, 3.5 GiB of each GPU" in caplog.text


@pytest.mark.parametrize("model", ["delta_net", "shared_all", "gated"])
def test_a_checkpoint_of_flame_becomes_a_model(tmp_path, model):
    trained = create(SMALL[model], seed=5)
    states = {"model": trained.state_dict(), "optimizer": {"lr": torch.ones(3)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(states, checkpoint_id=tmp_path / "step-7", no_dist=True)
    converted = flame.load_flame_checkpoint(tmp_path / "step-7", SMALL[model])
    expected = trained.state_dict()
    assert converted.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in converted.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "gpus", "vocabulary", "message"),
    [
        ({}, 3, 257, "3 GPUs cannot share a step of 4 sequences"),
        ({"steps": 200}, 2, 257, "200 steps need 800 sequences, there are 144"),
        ({}, 2, 200, "tokenizer has 257 ids"),
    ],
)
def test_a_run_is_refused_before_anything_is_written(
    tmp_path, tokens, tokenizer, changes, gpus, vocabulary, message
):
    output = Output(tmp_path / "out", tmp_path / "running", tokenizer=tokenizer)
    model = {**FLAMED, "vocab_size": vocabulary}
    with pytest.raises(InputError, match=message):
        flame.pretrain_with_flame(model, tokens, flame_recipe(**changes), output, gpus=gpus)
    assert not list(tmp_path.iterdir())
