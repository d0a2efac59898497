"""The benchmark of associative recall, on a tiny model."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import recall
from recall import answers, answers_only, draw

from statecut.errors import InputError
from statecut.models import create
from statecut.recovery.distillation import IGNORED

KEYS, LENGTH = 12, 32
TINY = {
    "layers": 1, "hidden": 16, "heads": 2, "head": 8, "keys": 6, "length": 16, "pairs": [2, 4],
    "steps": 4, "batch": 4, "epochs": 1, "rate": 1e-2, "sequences": 8, "held_out": 4,
}  # fmt: skip


def drawn(pairs, sequences=20):
    return draw(pairs, sequences, LENGTH, KEYS, np.random.default_rng(0)).astype(np.int64)


@pytest.mark.parametrize("pairs", [1, 3, 12])
def test_every_key_that_is_asked_for_was_listed_with_its_one_value(pairs):
    for ids in drawn(pairs):
        keys, values = ids[0::2], ids[1::2]
        listed = dict(zip(keys[:pairs], values[:pairs], strict=True))
        assert len(listed) == pairs
        assert all(listed[key] == value for key, value in zip(keys, values, strict=True))
        assert max(keys) < KEYS <= min(values)
        assert max(values) < 2 * KEYS


def test_more_pairs_than_keys_are_refused():
    with pytest.raises(InputError, match="15 pairs of 12 keys in 32 tokens"):
        drawn(15)


def test_keys_are_asked_for_equally_often_and_in_random_order():
    asked = drawn(3)[:, 6::2][:, :12]
    counts = [np.unique(row, return_counts=True)[1] for row in asked]
    assert np.array_equal(counts, np.full((20, 3), 4))
    assert len(np.unique(asked[:, :3], axis=0)) > 1


def test_sequences_differ_and_the_seed_decides():
    assert len(np.unique(drawn(3), axis=0)) == 20
    assert np.array_equal(drawn(3), drawn(3))


def test_answers_are_the_values_behind_the_pairs():
    ids = torch.from_numpy(np.concatenate([drawn(1, 2), drawn(3, 2), drawn(12, 2)]))
    labels = answers(ids)
    for row, label, pairs in zip(ids, labels, [1, 1, 3, 3, 12, 12], strict=True):
        assert torch.equal(label[2 * pairs + 1 :: 2], row[2 * pairs + 1 :: 2])
        assert (label[: 2 * pairs] == IGNORED).all()
        assert (label[0::2] == IGNORED).all()


def test_the_loss_is_of_answers_alone():
    config = recall.Bench(Path(), {**TINY, "keys": KEYS}, "cpu", Path()).config("delta_net")
    model, ids = create(config, seed=0), torch.from_numpy(drawn(3))
    logits = model(ids).logits[:, 6:-1:2]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 7::2].flatten())
    assert model(ids, labels=ids).loss.item() != pytest.approx(expected.item(), rel=1e-3)
    assert answers_only(model)(ids, labels=ids).loss.item() == pytest.approx(expected.item())


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    sizes = [
        text
        for name, value in TINY.items()
        for text in (f"--{name.replace('_', '-')}", *map(str, np.atleast_1d(value)))
    ]
    places = ["--folder", str(tmp_path / "kept"), "--out", str(tmp_path / "rows.jsonl")]

    def run(*more, only=False):
        arguments = [] if only else [*sizes, *places, "--recover", "2"]
        monkeypatch.setattr(sys, "argv", ["recall.py", *arguments, *more])
        recall.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("model", recall.MODELS)
def test_from_training_to_the_table(model, run, tmp_path):
    cells = ["--models", model, "--methods", "fisher", "rand", "--widths", "4"]
    run(*cells)
    out = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in out.open()]
    assert [row["method"] for row in rows] == [None, "fisher", "rand"]
    stages = rows[1]["accuracy"]
    assert list(stages) == ["sliced", "refitted", "recovered"]
    assert all(0 <= share <= 1 for shares in stages.values() for share in shares.values())
    whole = rows[0]["accuracy"]
    assert whole["unpruned"] == whole["unpruned, float32"]

    # What was lost is computed again, the same, with the model that is there.
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    trained = (tmp_path / "kept" / f"{model}-0" / "model.safetensors").stat().st_mtime_ns
    assert len(run(*cells).splitlines()) == 1
    assert (tmp_path / "kept" / f"{model}-0" / "model.safetensors").stat().st_mtime_ns == trained
    assert [json.loads(line)["accuracy"] for line in out.open()] == [r["accuracy"] for r in rows]

    lines = run("--table", str(out), only=True).splitlines()
    assert lines[0].startswith("Percent of answers that are right with 2, 4 pairs")
    assert lines[2] == "| model | stage | method | eps | 8 | 4 |"
    assert (
        sum(line.startswith(f"| {model} | recovered | rand | matched |  | ") for line in lines) == 1
    )

    with pytest.raises(InputError, match="made with other settings"):
        run(*cells, "--steps", "5")
