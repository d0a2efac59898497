"""Refit against the slow obvious version: whole models, hooks, all rows at once in float64."""

import json
import math
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL
from training_runs import packed

from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity
from statecut.models import create, load, save
from statecut.models.checkpoint import Checkpoint
from statecut.models.layerwise import LayerwiseModel
from statecut.pruning import refit as fitting
from statecut.pruning.refit import RIDGES, _Sums, refit, write_refitted
from statecut.pruning.slicing import Keep, cut_back, slice_model
from statecut.record import Record, refit_facts

NAMES = ["delta_net", "delta_net_gate", "delta_net_tied", "shared_head", "shared_all", "gated",
         "gated_no_gate", "gated_value_heads", "kda_value_heads", "qwen3_next", "qwen3_5",
         "qwen3_5_tied", "olmo_hybrid"]  # fmt: skip
EXPERTS = [name for name in SMALL if "num_experts" in SMALL[name]]
IDS = torch.randint(0, 97, (9, 70), generator=torch.Generator().manual_seed(4))
TINY = 1e-12  # a ridge that is none


def models(name, folder, *, width=None, value_width=None, dtype=torch.float64, **changes):
    """A model and what is left of it when each head keeps some channels, as folders; all value
    channels as they are unless there is a number of them."""
    if name in EXPERTS:  # PyTorch multiplies no groups of float64 matrices
        dtype = torch.float32
    save(create({**SMALL[name], **changes}, seed=3, dtype=dtype), folder / "teacher")
    teacher = Checkpoint(folder / "teacher")
    shape, generator = teacher.shape, torch.Generator().manual_seed(9)

    def some(channels, width):
        heads, full = shape.size(channels)
        return Keep(torch.stack([
            torch.randperm(full, generator=generator)[:width].sort().values
            for _ in range(len(shape.layers) * heads)
        ]).view(len(shape.layers), heads, -1))  # fmt: skip

    keys = some("key", width or shape.width // 4)
    values = some("value", value_width) if value_width else None
    slice_model(teacher, keys, folder / "student", values=values, dtype=dtype)
    return Checkpoint(folder / "student"), teacher


def fit(student, teacher, ridge=None, batch=4):
    return refit(student, teacher, IDS, ridges=[ridge] if ridge else RIDGES, batch=batch)


def rows(model, layer, projection, ids):
    """Of a whole model: what enters a projection of a layer, and the residual stream behind it."""
    block, seen = model.model.layers[layer], {}
    block.mlp.fuse_swiglu = False
    hooks = [
        block.get_submodule(projection).register_forward_hook(
            lambda m, x, o: seen.update(X=x[0], o=o)
        ),
        block.register_forward_pre_hook(lambda m, x: seen.update(h=x[0])),
        block.register_forward_hook(
            lambda m, x, o: seen.update(behind=o[0] if isinstance(o, tuple) else o)
        ),
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    stream = seen["behind"] if projection.startswith("mlp") else seen["h"] + seen["o"]
    return seen["X"].flatten(0, 1), stream.flatten(0, 1)


def slow(student, teacher, ridge=0.0):
    """W by name: lstsq on stacked rows, the ridge as more rows of them."""
    pruned, whole = load(student.folder), load(teacher.folder)
    weights = {}
    prefix, mixer = student.architecture.mixer.split("{layer}.")
    o_proj = mixer + student.architecture.o_proj.removesuffix(".weight")
    dense = hasattr(pruned.model.layers[student.shape.layers[0]].mlp, "down_proj")
    for layer in student.shape.layers:
        for projection in [o_proj, "mlp.down_proj"] if dense else [o_proj]:
            (X, mine), (_, theirs) = (rows(m, layer, projection, IDS) for m in (pruned, whole))
            W = pruned.model.layers[layer].get_submodule(projection).weight
            E = theirs - mine
            if ridge:
                damping = (ridge * X.square().sum(0).mean()).sqrt()
                X = torch.cat([X, damping * torch.eye(X.shape[1], dtype=X.dtype)])
                E = torch.cat([E, E.new_zeros(X.shape[1], E.shape[1])])
            W.data += torch.linalg.lstsq(X, E, driver="gelsd").solution.mT
            weights[f"{prefix}{layer}.{projection}.weight"] = W.data.clone()
    return weights


@pytest.mark.parametrize(("ridge", "value_width"), [(0.0, None), (1e-2, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_lstsq_on_all_rows(name, ridge, value_width, tmp_path):
    student, teacher = models(name, tmp_path, value_width=value_width)
    result = fit(student, teacher, ridge or TINY)
    expected = slow(student, teacher, ridge)
    assert result.weights.keys() == expected.keys()
    atol = 1e-3 if name in EXPERTS else 1e-6
    for key, weight in result.weights.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=atol)
    write_refitted(student, result, tmp_path / "refitted")
    assert Checkpoint(tmp_path / "refitted").shape == student.shape
    assert load(tmp_path / "refitted")(IDS[:1]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "width", "value_width"),
    [("gated", 12, None), ("gated", 16, 8), ("gated_value_heads", 8, 8), ("kda_value_heads", 8, 8)],
)
def test_the_refitted_model_is_closer_to_its_teacher(name, width, value_width, tmp_path):
    cut = {"width": width, "value_width": value_width}
    student, teacher = models(name, tmp_path, **cut, dtype=torch.float32)
    write_refitted(student, refit(student, teacher, IDS), tmp_path / "refitted")
    with torch.no_grad():
        exact, before, after = (
            load(tmp_path / n)(IDS).logits for n in ("teacher", "student", "refitted")
        )
    assert (after - exact).norm() < (before - exact).norm()


@pytest.mark.parametrize("name", NAMES)
def test_a_norm_that_was_folded_leaves_nothing_to_fit(name, tmp_path, monkeypatch):
    _, teacher = models(name, tmp_path)
    values = cut_back(teacher.shape, teacher.shape.value_width, "value")
    slice_model(teacher, None, tmp_path / "folded", values=values, dtype=None)
    folded = Checkpoint(tmp_path / "folded")
    monkeypatch.setattr(fitting, "check_cut_from", lambda *_: None)
    for key, weight in fit(folded, teacher, 1e-3).weights.items():
        torch.testing.assert_close(weight, folded.tensor(key), rtol=1e-5, atol=1e-6)


def test_text_that_says_the_same_over_and_over_is_refused(tmp_path):
    student, teacher = models("gated", tmp_path)
    sentence = torch.arange(19).repeat(20)
    same = sentence[: 6 * IDS.shape[1]].unfold(0, IDS.shape[1], 11)
    with pytest.raises(
        InputError, match=r"the text repeats itself: its .* tokens have 19 different"
    ):
        refit(student, teacher, same)


def test_the_batch_size_makes_no_difference(tmp_path):
    student, teacher = models("gated", tmp_path)
    one, seven = (fit(student, teacher, batch=batch) for batch in (1, 7))
    for key, weight in one.weights.items():
        torch.testing.assert_close(weight, seven.weights[key])
    assert one.tokens == IDS.numel()


@pytest.mark.parametrize("name", ["delta_net_tied", "gated"])
def test_layers_that_run_in_bf16_give_nearly_the_same(name, tmp_path, monkeypatch):
    student, teacher = models(name, tmp_path, width=12, dtype=torch.float32)
    exact = fit(student, teacher, 1e-2)
    monkeypatch.setattr(Checkpoint, "compute_dtype", lambda *_: torch.bfloat16)  # as on a GPU
    rough = fit(student, teacher, 1e-2)
    for key, weight in exact.weights.items():
        change, rough_change = (w - student.tensor(key) for w in (weight, rough.weights[key]))
        assert rough.weights[key].dtype == torch.float32
        assert (rough_change - change).norm() < 0.25 * change.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_infinite_ridge_gives_the_old_weights(dtype, tmp_path):
    student, teacher = models("delta_net", tmp_path, dtype=dtype)
    result = fit(student, teacher, math.inf)
    for key, weight in result.weights.items():
        assert torch.equal(weight, student.tensor(key))
    assert all(fit.error == 1 for fit in result.fits)


@pytest.mark.parametrize(
    ("dtype", "value_width"), [(torch.float64, 5), (torch.float32, None), (torch.bfloat16, None)]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_layer_on_its_text_never_rises(name, dtype, value_width, tmp_path):
    student, teacher = models(name, tmp_path, dtype=dtype, value_width=value_width)
    result = refit(student, teacher, IDS)
    assert all(fit.error <= 1 and fit.held_out <= 1 for fit in result.fits)
    assert all(fit.ridge in RIDGES for fit in result.fits)
    assert result.fits[0].error < 0.95  # random models, but something is gained


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 6), st.integers(1, 5))
def test_errors_from_sums_are_those_of_the_rows(seed, count, inputs, outputs):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    X, E, D = draw(count, inputs), draw(count, outputs), draw(outputs, inputs)
    sums = _Sums.zeros(inputs, outputs, "cpu")
    for x, e in zip(X.split(7), E.split(7), strict=True):
        sums.add(x, e, e)
    exact = (E - X @ D.mT).square().sum().item()
    assert sums.error(D) == pytest.approx(exact, rel=1e-9, abs=1e-9)
    for ridge in (1e-3, 1.0):
        damping = (ridge * X.square().sum(0).mean()).sqrt() * torch.eye(inputs).double()
        A, B = torch.cat([X, damping]), torch.cat([E, E.new_zeros(inputs, outputs)])
        solution = torch.linalg.lstsq(A, B, driver="gelsd").solution.mT
        torch.testing.assert_close(sums.solve(ridge), solution, rtol=1e-5, atol=1e-7)
        assert sums.error(sums.solve(ridge)) <= sums.error(torch.zeros_like(D)) + 1e-9


def test_inputs_that_are_all_zero_leave_the_weight():
    sums = _Sums.zeros(4, 3, "cpu")
    sums.add(torch.zeros(5, 4), torch.ones(5, 3), torch.ones(5, 3))
    assert not sums.solve(1e-2).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_ridge_is_the_best_on_the_rows_held_out(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    W, parts = draw(3, 4), []
    for count in (6, 3):
        X = draw(count, 4)
        sums = _Sums.zeros(4, 3, "cpu")
        E = X @ W.mT * 0.3 + draw(count, 3)
        sums.add(X, E, E)
        parts.append(sums)
    most, rest = parts
    ridge, error = fitting._best_ridge(most, rest, RIDGES)
    errors = [rest.error(most.solve(ridge)) for ridge in RIDGES]
    assert error == min(errors) == errors[RIDGES.index(ridge)]
    assert error <= float(rest.square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delta_net_tied", "gated"])
def test_a_refitted_model_is_an_ordinary_model(name, dtype, tmp_path):
    import fla.models  # noqa: F401
    from transformers import AutoModelForCausalLM

    student, teacher = models(name, tmp_path, dtype=dtype)
    result = refit(student, teacher, IDS)
    write_refitted(student, result, tmp_path / "refitted", files={"README.md": "A model."})
    assert (tmp_path / "refitted" / "README.md").read_text() == "A model."
    facts = refit_facts(result.entry())
    expected = f"o_proj of 2 layers and down_proj of 2 layers, on {IDS.numel()} tokens"
    assert facts["refitted"] == expected
    old, new = (dict(Checkpoint(tmp_path / n).tensors()) for n in ("student", "refitted"))
    assert {n: (t.shape, t.dtype) for n, t in old.items()} == {
        n: (t.shape, t.dtype) for n, t in new.items()
    }
    assert {n for n in old if not torch.equal(old[n], new[n])} == result.weights.keys()
    config = json.loads((tmp_path / "refitted" / "config.json").read_text())
    assert config == student.config
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "refitted", dtype=torch.float32).eval()
    ours = load(tmp_path / "refitted", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(stock(IDS[:2]).logits, ours(IDS[:2]).logits)


def test_only_one_layer_is_in_memory(tmp_path, monkeypatch):
    student, teacher = models("delta_net", tmp_path)
    run = LayerwiseModel.run

    def checked(stream, index, batch):
        filled = [i for i, m in enumerate(stream.layers) if not next(m.parameters()).is_meta]
        assert filled == [index]
        run(stream, index, batch)

    monkeypatch.setattr(LayerwiseModel, "run", checked)
    fit(student, teacher)


@pytest.mark.parametrize("name", NAMES)
def test_perplexity_layer_by_layer_is_that_of_the_whole_model(name, tmp_path):
    student, teacher = models(name, tmp_path, dtype=torch.float32)
    for checkpoint in (student, teacher):
        with torch.no_grad():
            loss = load(checkpoint.folder)(IDS, labels=IDS).loss.item()
        assert perplexity(checkpoint, IDS, batch=4) == pytest.approx(math.exp(loss), rel=1e-4)


# Bad input


def test_a_model_that_was_never_cut_is_refused(tmp_path):
    _, teacher = models("delta_net", tmp_path)
    with pytest.raises(InputError, match="16 x 16 there and 16 x 16 here, so nothing was cut"):
        refit(teacher, teacher, IDS)


def test_text_that_is_too_short_is_refused(tmp_path):
    student, teacher = models("delta_net", tmp_path)
    with pytest.raises(InputError, match=r"30 tokens of text for the \d+ unknowns .*_proj"):
        refit(student, teacher, IDS[:4, :10])
    with pytest.raises(InputError, match="1 sequence of text; give at least 2"):
        refit(student, teacher, IDS[:1])


def test_a_model_whose_layers_read_more_than_the_stream_is_refused(tmp_path):
    student, teacher = models("delta_net", tmp_path)
    student.config["attnres_block_size"] = 2
    with pytest.raises(InputError, match="attnres_block_size is set"):
        refit(student, teacher, IDS)


def test_a_student_that_was_rounded_has_its_teacher(tmp_path):
    _, teacher = models("delta_net", tmp_path, dtype=torch.float32)
    slice_model(teacher, Keep(torch.arange(4).expand(2, 2, 4)), tmp_path / "rounded",
                dtype=torch.float16)  # fmt: skip
    assert refit(Checkpoint(tmp_path / "rounded"), teacher, IDS).fits


def test_a_teacher_of_another_kind_is_refused(tmp_path):
    student, _ = models("delta_net", tmp_path)
    save(create(SMALL["gated"] | {"head_dim": 24}, seed=3), tmp_path / "other")
    with pytest.raises(InputError, match="was cut from: it is a gated_deltanet"):
        refit(student, Checkpoint(tmp_path / "other"), IDS)


def test_a_teacher_with_other_weights_is_refused(tmp_path):
    student, _ = models("delta_net", tmp_path)
    save(create(SMALL["delta_net"], seed=4, dtype=torch.float64), tmp_path / "other")
    with pytest.raises(InputError, match=r"other is not the model .* their embeddings differ"):
        refit(student, Checkpoint(tmp_path / "other"), IDS)


def test_a_teacher_that_the_record_does_not_name_is_refused(tmp_path):
    student, teacher = models("delta_net", tmp_path)
    for digest in (teacher.digest(), "of another"):
        record = Record().then(base={"digest": digest}, cut={})
        (student.folder / "statecut.json").write_text(json.dumps(record.entries))
        if digest == teacher.digest():
            assert fit(student, teacher).fits
        else:
            with pytest.raises(InputError, match=r"statecut.json names others, of another"):
                fit(student, teacher)


@pytest.mark.parametrize(
    ("which", "tensor", "message"),
    [
        ("student", "v_proj.weight", r"layer 1: NaN or infinity in what enters attn.o_proj of "),
        ("teacher", "o_proj.weight", r"layer 1: NaN or infinity in the residual stream of "),
    ],
)
def test_an_activation_that_is_no_number_names_layer_and_model(which, tensor, message, tmp_path):
    folders = models("delta_net", tmp_path)
    broken = load(tmp_path / which)
    with torch.no_grad():
        broken.model.layers[1].attn.get_parameter(tensor)[5, 0] = math.nan
    save(broken, tmp_path / "broken" / which)
    replaced = Checkpoint(tmp_path / "broken" / which)
    student, teacher = (replaced, folders[1]) if which == "student" else (folders[0], replaced)
    with pytest.raises(InputError, match=f"{message}.*broken/{which}$"):
        refit(student, teacher, IDS)


def test_sums_are_of_float32_products_whatever_the_process_has_set(tmp_path, monkeypatch):
    precisions = set()

    class Observed(_Sums):
        def add(self, X, E, size):
            precisions.add(torch.get_float32_matmul_precision())
            super().add(X, E, size)

    student, teacher = models("delta_net", tmp_path)
    monkeypatch.setattr(fitting, "_Sums", Observed)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        fit(student, teacher)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert precisions == {"highest"}


def test_the_benchmark_writes_a_row_for_each_cell(tmp_path, monkeypatch, capsys):
    folder = Path(__file__).parents[1] / "benchmarks"
    save(create(SMALL["gated"], seed=1), tmp_path / "model")
    packed(tmp_path / "text", 64, slices={"held_out": (0, 4), "calibration": (4, 64)})
    monkeypatch.syspath_prepend(folder)
    arguments = ["refit.py", "--models", "model", "--text", "text", "--methods", "fisher", "l1",
                 "--ratios", "0.75", "--sequences", "12", "--out", "rows.jsonl"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time there is nothing left to do
        runpy.run_path(str(folder / "refit.py"), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["fisher", "l1"]
    assert all(row["perplexity"].keys() == {"unpruned", "sliced", "refitted"} for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


@pytest.mark.parametrize(("name", "count"), [("refit", 24), ("refit-recovered", 12)])
def test_the_document_has_the_rows_of_the_benchmark(monkeypatch, name, count):
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root / "benchmarks")
    table = runpy.run_path(str(root / "benchmarks" / "refit.py"))["table"]
    rows = (root / "benchmarks" / "h200" / f"{name}.jsonl").read_text().splitlines()
    _, _, *lines = table([json.loads(row) for row in rows])
    document = (root / "docs" / "refit.md").read_text()
    assert len(lines) == count
    assert all(line.split(" | ", 3)[3] in document for line in lines)
