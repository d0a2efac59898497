"""`import statecut` as a user meets it: every example of a docstring runs, models in memory and on
disk give the same."""

import doctest
import inspect as introspection
import json
import shutil
from functools import partial

import pytest
import torch
from small_models import SMALL, logits, workplace

import statecut
from statecut.data.tokenizer import load_tokenizer
from statecut.models.checkpoint import Checkpoint, save
from statecut.pruning.slicing import slice_model

FUNCTIONS = [name for name in statecut.__all__ if introspection.isfunction(getattr(statecut, name))]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = workplace(tmp_path_factory.mktemp("api"), *SMALL)
    (root / "gated").rename(root / "model")
    (root / "text.jsonl").rename(root / "corpus.jsonl")
    return root


@pytest.fixture(scope="module")
def names(root):
    """What the examples of docstrings use."""
    model = statecut.load(root / "model")
    tokens = statecut.tokenize(root / "corpus.jsonl", root / "model", sequences=16, length=32)
    calibration = statecut.calibrate(model, tokens)
    kept = statecut.select(model, calibration, keys=8)
    smaller = statecut.slice(model, kept)
    return {"statecut": statecut, "torch": torch, "model": model, "tokens": tokens,
            "calibration": calibration, "kept": kept, "smaller": smaller}  # fmt: skip


SMALLER = {  # than the defaults of commands, which are for real models
    "prune": ('jsonl")', 'jsonl", sequences=16, length=32)'),
    "recover": ("steps=200", "steps=2, batch=2, length=32, device='cpu'"),
    "evaluate": ("sequences=16", "sequences=2, length=32"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_docstring_runs(root, names, name, monkeypatch, tmp_path):
    for file in ("model", "corpus.jsonl"):
        (tmp_path / file).symlink_to(root / file)
    monkeypatch.chdir(tmp_path)
    if name in ("recover", "evaluate"):
        statecut.save(names["smaller"], "smaller")
    examples = doctest.DocTestParser().get_examples(getattr(statecut, name).__doc__)
    assert examples
    known = dict(names)
    for example in examples:
        if "tasks=" not in example.source:  # their data are on the hub
            source = example.source.replace(*SMALLER.get(name, ("", "")))
            exec(compile(source, name, "single"), known)


@pytest.mark.parametrize("values", [None, 6])
@pytest.mark.parametrize("name", ["model", "delta_net_tied", "shared_head", "kda", "qwen3_next",
                                  "qwen3_5_tied", "qwen4_exp", "olmo_hybrid",
                                  "nemotron_h"])  # fmt: skip
def test_a_cut_in_memory_is_the_cut_on_disk(root, tmp_path, name, values):
    model = statecut.load(root / name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    kept = statecut.select(model, method="l1", keys=6, values=values)
    sliced = statecut.slice(model, kept)
    slice_model(Checkpoint(root / name), **kept.changes(), out=tmp_path / "out", dtype=None)
    on_disk = statecut.load(tmp_path / "out")
    ids = torch.arange(40)[None] % 97
    assert torch.equal(logits(sliced, ids), logits(on_disk, ids))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    statecut.save(sliced, tmp_path / "saved")
    assert torch.equal(logits(statecut.load(tmp_path / "saved"), ids), logits(sliced, ids))
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    if (name, values) == ("nemotron_h", 6):
        assert " (times 12/6, and " in (tmp_path / "saved" / "README.md").read_text()


def test_a_refit_in_memory_is_the_refit_on_disk(root, names, tmp_path):
    model, tokens = names["model"], names["tokens"]
    smaller = statecut.slice(model, names["kept"])
    statecut.save(smaller, tmp_path / "cut")
    result = statecut.refit(smaller, model, tokens)
    on_disk = statecut.refit(tmp_path / "cut", root / "model", tokens, out=tmp_path / "refitted")
    assert result.fits == on_disk.fits
    ids = tokens[:4]
    assert statecut.perplexity(smaller, ids) == statecut.perplexity(tmp_path / "refitted", ids)
    assert statecut.perplexity(model, ids) == statecut.perplexity(root / "model", ids)
    assert statecut.load(tmp_path / "refitted").statecut_record.entries[-1]["refit"]


@pytest.mark.parametrize("name", ["delta_net_tied", "qwen3_next", "olmo_hybrid"])
def test_16_bits_are_computed_in_32_on_a_cpu_and_written_as_16(root, tmp_path, name):
    save(statecut.load(root / name).to(torch.bfloat16), tmp_path / "short")
    model = statecut.load(tmp_path / "short")
    assert model.dtype == torch.float32
    smaller = statecut.slice(model, statecut.select(model, method="l1", keys=8))
    assert smaller.dtype == torch.float32
    statecut.save(smaller, tmp_path / "out")
    written = Checkpoint(tmp_path / "out")
    assert written.dtype == "bfloat16"
    assert ("lm_head.weight" in written.files) == ("tied" not in name)
    assert {tensor.dtype for _, tensor in written.tensors()} == {torch.bfloat16}
    ids = torch.arange(9)[None]
    for parameter in smaller.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    assert torch.equal(logits(statecut.load(tmp_path / "out"), ids), logits(smaller, ids))


def test_what_a_cut_model_was_cut_from_is_not_replaced_by_it(root, names, tmp_path):
    shutil.copytree(root / "model", tmp_path / "model")
    options = {"ratio": 0.5, "method": "l1", "refit": False}
    statecut.prune(tmp_path / "model", tmp_path / "once", **options)
    with pytest.raises(statecut.InputError, match="once was cut from it, and it would be lost"):
        statecut.prune(tmp_path / "once", tmp_path / "model", **options, force=True)
    with pytest.raises(statecut.InputError, match="this selection was made for the model"):
        statecut.slice(statecut.load(tmp_path / "once"), names["kept"])
    twice = statecut.prune(tmp_path / "once", tmp_path / "twice", **options)
    assert [*twice.record.last["measured"]["models"]] == ["before", "cut"]


def test_the_record_of_a_second_cut_has_both(root, names, tmp_path):
    """And the second is as exact as the first: it is the model cut once to the same channels."""
    model = names["model"]
    first = statecut.slice(model, names["kept"])
    statecut.save(first, tmp_path / "first")
    loaded = statecut.load(tmp_path / "first")
    again = statecut.select(loaded, method="l1", keys=4)
    statecut.save(statecut.slice(loaded, again), tmp_path / "second")
    one, two = json.loads((tmp_path / "second" / "statecut.json").read_text())
    assert (one["cut"]["keys"], two["cut"]["keys"]) == ([8, 16], [4, 8])
    assert two["cut"]["eps"] == [2e-6, 4e-6]
    kept = names["kept"].tensors["kept"].gather(-1, again.tensors["kept"])
    at_once = statecut.select(model, method="l1", keys=4)
    at_once.tensors["kept"] = kept
    ids = names["tokens"][:2]
    exact = logits(statecut.slice(model, at_once), ids)
    torch.testing.assert_close(exact, logits(statecut.load(tmp_path / "second"), ids))


def test_arguments_that_cannot_be_are_input_errors(root, names):
    model, tokens, text = names["model"], names["tokens"], root / "corpus.jsonl"
    for call, message in (
        (lambda: statecut.perplexity(model, tokens[0]), "must be ids"),
        (lambda: statecut.perplexity(model, tokens.float()), "must be ids"),
        (lambda: statecut.perplexity(model, tokens[:0]), "must be ids"),
        (lambda: statecut.perplexity(model, tokens[:, :1]), "--length 1: must be 2 or more"),
        (lambda: statecut.perplexity(model, tokens + 200), "the model's are 0 to 269"),
        (lambda: statecut.perplexity(model, tokens, batch=0), "--batch 0: must be 1 or more"),
        (lambda: statecut.tokenize(text, root / "model", length=0), "--length 0: must be 2"),
        (lambda: statecut.calibrate(model, tokens, seed=-1), "--seed -1: must lie between 0"),
        (lambda: statecut.calibrate(model, tokens, rows=-1), "--rows -1: must be 1 or more"),
        (lambda: statecut.select(model, method="rand", keys=8, seed=-1), "--seed -1: must lie"),
    ):
        with pytest.raises(statecut.InputError, match=message):
            call()


def test_a_model_that_is_measured_and_refitted_stays_as_it_was(root, names):
    model = statecut.load(root / "model").train()
    model.model.layers[0].eval()
    smaller = statecut.slice(model, names["kept"])
    modes = [[module.training for module in m.modules()] for m in (model, smaller)]
    statecut.perplexity(model, names["tokens"])
    statecut.refit(smaller, model, names["tokens"])
    assert modes == [[module.training for module in m.modules()] for m in (model, smaller)]
    assert all(layer.mlp.fuse_swiglu for layer in smaller.model.layers)


WORDS = [
    (
        lambda: statecut.prune("model", "out", ratio=0.5, eps="match"),
        "--eps match: give matched or",
    ),
    (
        lambda: statecut.prune("model", "out", ratio=0.5, dtype="int8"),
        "--dtype int8: give bfloat16",
    ),
    (lambda: statecut.slice("model", None, eps="match"), "--eps match: give matched or kept"),
]


@pytest.mark.parametrize(("call", "message"), WORDS)
def test_a_word_that_an_option_does_not_have_is_refused(call, message):
    with pytest.raises(statecut.InputError, match=message):
        call()


def test_force_replaces_a_model_and_nothing_else(root, names, tmp_path, monkeypatch):
    shutil.copytree(root / "model", tmp_path / "model")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    model, tokens = statecut.load(tmp_path / "model"), names["tokens"]
    statecut.save(statecut.slice(model, names["kept"]), tmp_path / "cut")
    monkeypatch.setattr("statecut.pruning.refit.refit", None)  # before any work
    refused = "(would be lost|exists and is not a model)"
    for out in (tmp_path / name for name in ("model", "cut", "papers")):
        with pytest.raises(statecut.InputError, match=f"{out.name} {refused}"):
            statecut.refit(tmp_path / "cut", tmp_path / "model", tokens, out=out, force=True)
    for out in (tmp_path / name for name in ("model", "papers")):
        with pytest.raises(statecut.InputError, match=f"{out.name} {refused}"):
            statecut.save(model, out, force=True)
    statecut.save(model, tmp_path / "cut", force=True)
    assert (tmp_path / "papers" / "thesis.tex").exists()


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


def test_a_model_is_evaluated_on_text_and_on_tasks(root, names, tmp_path, monkeypatch, capsys):
    from lm_eval.tasks import TaskManager

    own_alone = partial(TaskManager, include_defaults=False)  # the others are thousands of files
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own_alone)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "few.jsonl").write_text('{"text": "a word or two"}\n{"text": "and more words"}\n')
    (tmp_path / "own.yaml").write_text(TASK.format(name="own", file=tmp_path / "few.jsonl"))
    sizes = {"sequences": 16, "length": 32}
    found = statecut.evaluate(root / "model", text=root / "corpus.jsonl", **sizes)
    assert found.perplexity == statecut.perplexity(names["model"], names["tokens"])
    assert str(found) == f"perplexity  {found.perplexity:.3f}  (512 tokens)"
    found = statecut.evaluate(
        root / "model", tasks="own", include_path=tmp_path, limit=1, length=64
    )
    model, tokenizer = names["model"], load_tokenizer(root / "model")
    ids = torch.from_numpy(tokenizer.encode("a word or two"))
    start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    seen = logits(model, torch.cat([torch.tensor([start]), ids])[None, :-1])[0]
    loss = torch.nn.functional.cross_entropy(seen, ids, reduction="sum")
    assert found.tasks["own"]["word_perplexity"] == pytest.approx((loss / 4).exp().item(), rel=1e-4)
    for bad, message in (
        ({}, "what to evaluate is missing"),
        ({"tasks": "no_such_task"}, "lm-eval has no no_such_task"),
        ({"text": "nowhere.txt"}, "no such file"),
    ):
        with pytest.raises(statecut.InputError, match=message):
            statecut.evaluate(root / "model", **bad)
