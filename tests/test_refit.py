"""Refit against the slow obvious version: whole models, hooks, all rows at once in float64."""

import json
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL, WITH_EXPERTS, logits, some, widths

from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity
from statecut.models.checkpoint import Checkpoint, create, load, save
from statecut.models.layerwise import LayerwiseModel
from statecut.pruning.refit import RIDGES, _Sums, refit, write_refitted
from statecut.pruning.slicing import slice_model
from statecut.record import Record

IDS = torch.randint(0, 97, (9, 70), generator=torch.Generator().manual_seed(4))
TINY = 1e-12  # a ridge that is none
# Modules that mix residual streams for the mixer and the MLP, and which output has what they get.
STREAMS = {("attn_hyper_connection", "mlp_hyper_connection"): 2, ("attn_hc", "ffn_hc"): 0}


def models(name, folder, *, width=None, value_width=None, dtype=torch.float64):
    """A model and what is left of it when each head keeps some channels, as folders."""
    if name in WITH_EXPERTS:  # PyTorch multiplies no groups of float64 matrices
        dtype = torch.float32
    save(create(SMALL[name], seed=3, dtype=dtype), folder / "teacher")
    teacher = Checkpoint(folder / "teacher")
    width, value_width = widths(name, width or teacher.shape.width // 4, value_width)
    keys = some(teacher.shape, width, "key", seed=9)
    values = some(teacher.shape, value_width, seed=9) if value_width else None
    slice_model(teacher, keys, folder / "student", values=values, dtype=dtype)
    return Checkpoint(folder / "student"), teacher


def fit(student, teacher, ridge=None):
    return refit(student, teacher, IDS, ridges=[ridge] if ridge else RIDGES, batch=4)


def rows(model, layer, projection, ids):
    """Of a whole model: what enters a projection of a layer, and the residual stream behind it. Of
    several streams a row each, with what enters times what the stream gets of the output."""
    block, seen = model.model.layers[layer], {}
    if hasattr(block, "mlp"):
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
    in_mlp = projection.startswith("mlp")
    for (before, behind), shares in STREAMS.items():
        if hasattr(block, before):
            mixes, adds = block.get_submodule(before), block.get_submodule(behind)
            hooks += [
                (adds if in_mlp else mixes).register_forward_hook(
                    lambda m, x, o, at=shares: seen.update(shares=o[at])
                ),
                adds.register_forward_pre_hook(lambda m, x: seen.update(streams=x[0])),
            ]
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    if "shares" in seen:
        X = torch.einsum("bts,bti->btsi", seen["shares"], seen["X"])
        streams = seen["behind"] if in_mlp else seen["streams"]
        return X.flatten(0, 2), streams.reshape(*X.shape[:3], -1).flatten(0, 2)
    stream = seen["behind"] if in_mlp else seen["h"] + seen["o"]
    return seen["X"].flatten(0, 1), stream.flatten(0, 1)


def slow(student, teacher, ridge=0.0):
    """W by name: lstsq on stacked rows, the ridge as more rows of them."""
    pruned, whole = load(student.folder), load(teacher.folder)
    weights = {}
    prefix, mixer = student.architecture.mixer.split("{layer}.")
    o_proj = mixer + student.architecture.o_proj.removesuffix(".weight")
    for layer in student.shape.layers:
        names = dict(pruned.model.layers[layer].named_modules())
        dense = "mlp.down_proj" in names
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


@pytest.mark.parametrize(
    ("name", "ridge", "value_width"),
    [*((name, 1e-2, 5) for name in SMALL), ("gated", 0.0, None)],
)
def test_weights_are_those_of_lstsq_on_all_rows(name, ridge, value_width, tmp_path):
    student, teacher = models(name, tmp_path, value_width=value_width)
    result = fit(student, teacher, ridge or TINY)
    expected = slow(student, teacher, ridge)
    assert result.weights.keys() == expected.keys()
    atol = 1e-3 if name in WITH_EXPERTS else 1e-6
    for key, weight in result.weights.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=atol)


def test_layers_that_run_in_bf16_give_nearly_the_same(tmp_path, monkeypatch):
    student, teacher = models("gated", tmp_path, width=12, dtype=torch.float32)
    exact = fit(student, teacher, 1e-2)
    monkeypatch.setattr(Checkpoint, "compute_dtype", lambda *_: torch.bfloat16)  # as on a GPU
    rough = fit(student, teacher, 1e-2)
    for key, weight in exact.weights.items():
        change = weight - student.tensor(key)
        assert rough.weights[key].dtype == torch.float32
        assert (rough.weights[key] - weight).norm() < 0.25 * change.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delta_net", "gated_value_heads", "shared_all", "qwen3_next"])
def test_the_error_of_a_layer_never_rises_and_nothing_else_changes(name, dtype, tmp_path):
    student, teacher = models(name, tmp_path, dtype=dtype)
    result, out = refit(student, teacher, IDS), tmp_path / "refitted"
    assert all(fit.error <= 1 for fit in result.fits)
    assert all(fit.ridge in RIDGES for fit in result.fits)
    assert result.fits[0].error < 0.95  # random models, but something is gained
    write_refitted(student, result, out, files={"README.md": "A model."})
    assert (out / "README.md").read_text() == "A model."
    assert json.loads((out / "config.json").read_text()) == student.config
    old, new = (dict(Checkpoint(folder).tensors()) for folder in (student.folder, out))
    assert {name: t.dtype for name, t in old.items()} == {name: t.dtype for name, t in new.items()}
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {fit.name for fit in result.fits if fit.ridge < math.inf}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 6), st.integers(1, 5))
def test_errors_from_sums_are_those_of_the_rows(seed, count, inputs, outputs):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    X, E, D = draw(count, inputs), draw(count, outputs), draw(outputs, inputs)
    sums = _Sums.zeros(inputs, outputs, "cpu")
    for x, e in zip(X.split(7), E.split(7), strict=True):
        sums.add(x, e)
    exact = (E - X @ D.mT).square().sum().item()
    assert sums.error(D) == pytest.approx(exact, rel=1e-9, abs=1e-9)
    for ridge in (1e-3, 1.0):
        damping = (ridge * X.square().sum(0).mean()).sqrt() * torch.eye(inputs).double()
        A, B = torch.cat([X, damping]), torch.cat([E, E.new_zeros(inputs, outputs)])
        solution = torch.linalg.lstsq(A, B, driver="gelsd").solution.mT
        torch.testing.assert_close(sums.solve(ridge), solution, rtol=1e-5, atol=1e-7)
        assert sums.error(sums.solve(ridge)) <= sums.error(torch.zeros_like(D)) + 1e-9


def test_only_one_layer_is_in_memory_and_products_are_of_float32(tmp_path, monkeypatch):
    student, teacher = models("delta_net", tmp_path)
    run = LayerwiseModel.run

    def checked(stream, index, batch):
        filled = [i for i, m in enumerate(stream.layers) if not next(m.parameters()).is_meta]
        assert filled == [index]
        assert torch.get_float32_matmul_precision() == "highest"
        run(stream, index, batch)

    monkeypatch.setattr(LayerwiseModel, "run", checked)
    torch.set_float32_matmul_precision("medium")
    try:
        fit(student, teacher)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", SMALL)
def test_perplexity_layer_by_layer_is_that_of_the_whole_model(name, folders):
    with torch.no_grad():
        loss = load(folders / name)(IDS, labels=IDS).loss.item()
    found = perplexity(Checkpoint(folders / name), IDS, batch=4)
    assert found == pytest.approx(math.exp(loss), rel=1e-4)


def test_text_and_teachers_that_cannot_be_are_refused(tmp_path):
    student, teacher = models("delta_net", tmp_path, dtype=torch.float32)
    save(create(SMALL["gated"] | {"head_dim": 24}, seed=3), tmp_path / "gated")
    save(create(SMALL["delta_net"], seed=4), tmp_path / "other")
    gated, other = Checkpoint(tmp_path / "gated"), Checkpoint(tmp_path / "other")
    same = torch.arange(19).repeat(20)[: 6 * IDS.shape[1]].unfold(0, IDS.shape[1], 11)
    for model, unpruned, ids, message in (
        (student, teacher, same, r"the text repeats itself: its .* tokens have 19 different"),
        (
            student,
            teacher,
            IDS[:4, :10],
            r"30 tokens of text \(one sequence of 8 is held out\) for the \d+ unknowns .*_proj",
        ),
        (student, teacher, IDS[:1], "1 sequence of text; give at least 2"),
        (teacher, teacher, IDS, "16 x 16 there and 16 x 16 here, so nothing was cut"),
        (student, gated, IDS, "was cut from: it is a gated_deltanet"),
        (student, other, IDS, r"other is not the model .* their embeddings differ"),
    ):
        with pytest.raises(InputError, match=message):
            refit(model, unpruned, ids)
    record = Record().then(base={"digest": teacher.digest()}, cut={})
    keys, files = some(teacher.shape, 4, "key"), {"statecut.json": json.dumps(record.entries)}
    slice_model(teacher, keys, tmp_path / "rounded", dtype=torch.float16, files=files)
    assert refit(Checkpoint(tmp_path / "rounded"), teacher, IDS).fits  # it is its teacher's
    files = json.dumps(Record().then(base={"digest": "of another"}, cut={}).entries)
    (student.folder / "statecut.json").write_text(files)
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
