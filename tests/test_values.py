"""Value channels: what is cut, what is exact, and how they are chosen."""

import json
import math
from itertools import product

import pytest
import readme
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import MORE, SMALL, logits, rewritten, some, workplace

from statecut.errors import InputError
from statecut.models import load
from statecut.models.architectures import ARCHITECTURES
from statecut.models.capture import mixers
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate, calibrate_layerwise
from statecut.pruning.rrqr import strong_rrqr
from statecut.pruning.select import select
from statecut.pruning.slicing import check_sliceable, slice_model
from statecut.pruning.statistics import ModelStatistics

IDS = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(1))


# The adapters


@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_fla_reads_every_pair_of_widths_from_the_config(name):
    """It takes int(head_dim * expand_v), and wants the product near a whole number."""
    kind = ARCHITECTURES[name]
    config = {"model_type": name, "num_heads": 2, "head_dim": 256, "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "expand_v": 1.0}
    for width, value_width in product(range(1, 257), repeat=2):
        resized = json.loads(json.dumps(kind.resized(config, width, value_width)))
        exact = resized["head_dim"] * resized["expand_v"]
        assert int(exact) == value_width
        assert math.isclose(exact, value_width)
        shape = kind.shape(resized)
        assert (shape.width, shape.value_width) == (width, value_width)


@settings(deadline=None, max_examples=300)
@given(
    heads=st.integers(1, 32),
    width=st.integers(1, 256),
    value_width=st.integers(1, 512),
    hidden=st.integers(8, 8192),
)
@example(heads=8, width=61, value_width=256, hidden=1792)
def test_delta_net_widths_are_both_read_back(heads, width, value_width, hidden):
    """fla 0.6 rounds hidden_size * expand_v, older ones truncate it."""
    kind = ARCHITECTURES["delta_net"]
    config = {"model_type": "delta_net", "num_heads": heads, "hidden_size": hidden,
              "num_hidden_layers": 1}  # fmt: skip
    resized = json.loads(json.dumps(kind.resized(config, width, value_width)))
    for key, size in (("expand_k", width), ("expand_v", value_width)):
        product = hidden * resized[key]
        assert math.isclose(product, round(product))
        assert int(product) == round(product) == heads * size
    shape = kind.shape(resized)
    assert (shape.width, shape.value_width) == (width, value_width)
    assert kind.shape(kind.resized(resized, 1)).value_width == value_width


# What is exact


# Written, loaded and run


@pytest.mark.parametrize("name", MORE)
def test_models_load_plainly_run_and_generate_from_their_cache(folders, tmp_path, name):
    """By transformers and fla alone; nothing may be missing, left over, or of another shape."""
    import fla.models  # noqa: F401
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint(folders / name)
    shape = checkpoint.shape
    for width, value_width in ((shape.width, shape.value_width - 1), (3, 5)):
        out = tmp_path / f"{width}x{value_width}"
        keys, values = some(shape, width, "key"), some(shape, value_width)
        slice_model(checkpoint, keys, out, values=values, dtype=None)
        model = load(out)
        assert {(m.head_k_dim, m.head_v_dim) for m in mixers(model)[2]} == {(width, value_width)}
        plain, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(report.values()), report
        assert torch.equal(logits(plain.eval(), IDS), logits(model, IDS))
        ids, model.generation_config.eos_token_id = IDS[:, :9], None
        found = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for _ in range(4):
            ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], 1)
        assert torch.equal(found, ids)


# Choosing them


def projection_inputs(model, ids, backward=False):
    """What enters the output projections, (layers, tokens, value heads, d_v), and its gradient."""
    kind, shape, modules = mixers(model)
    rows = []

    def keep(module, args):
        if backward:
            args[0].retain_grad()
        rows.append(args[0])

    o_proj = kind.o_proj.removesuffix(".weight")
    hooks = [m.get_submodule(o_proj).register_forward_pre_hook(keep) for m in modules]
    loss = model(ids, labels=ids, use_cache=False).loss
    if backward:
        loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = [x.grad for x in rows] if backward else []
    return [
        torch.stack([x.detach().flatten(0, 1).unflatten(1, shape.size("value")) for x in part])
        for part in (rows, gradients)
        if part
    ]


@pytest.fixture(scope="module", params=["gated", "delta_net", "gated_value_heads", "qwen3_5_tied",
                                        "kda_value_heads"])  # fmt: skip
def calibrated(request, folders):
    checkpoint = Checkpoint(folders / request.param)
    calibration = calibrate(
        load(checkpoint.folder), [IDS[:1], IDS[1:]], sample_rows=50,
        values=True, provenance={"model_digest": checkpoint.digest()},
    )  # fmt: skip
    return ModelStatistics(checkpoint, calibration)


def test_calibration_has_what_enters_the_projection(calibrated):
    checkpoint, found = calibrated.checkpoint, calibrated.calibration.tensors
    x, gradient = projection_inputs(load(checkpoint.folder), IDS, backward=True)
    gram = torch.einsum("lthi,lthj->lhij", x.double(), x.double())
    torch.testing.assert_close(found["gram.v.raw"], gram, rtol=1e-4, atol=1e-6)
    # The hand-made gradient is that of the mean over both sequences, which have as many tokens.
    losses = IDS.shape[0] * (IDS.shape[1] - 1)
    squares = (x.double() * gradient.double() * losses).square().mean(1)
    torch.testing.assert_close(found["fisher.v"], squares, rtol=1e-3, atol=1e-9)
    ours = found["sample.v.raw"].diagonal(dim1=-2, dim2=-1).sum((1, 2))
    assert (ours < gram.diagonal(dim1=-2, dim2=-1).sum((1, 2))).all()
    layered = calibrate_layerwise(checkpoint, IDS.split(1), sample_rows=50, values=True).tensors
    for name in ("gram.v.raw", "sample.v.raw"):
        torch.testing.assert_close(layered[name], found[name], rtol=1e-5, atol=1e-7)
    # Nothing of values is recorded unless asked for.
    digest = {"model_digest": checkpoint.digest()}
    keys = calibrate_layerwise(checkpoint, IDS.split(1), sample_rows=50, provenance=digest)
    assert layered.keys() - keys.tensors.keys() == {"gram.v.raw", "sample.v.raw"}
    with pytest.raises(InputError, match="was not measured: calibrate with values=True"):
        select("drrqr", ModelStatistics(checkpoint, keys), [3], channels="value")


def test_drrqr_keeps_the_columns_of_a_strong_rank_revealing_qr(calibrated):
    (x,) = projection_inputs(load(calibrated.checkpoint.folder), IDS)
    for selection, width in zip(
        select("drrqr", calibrated, [3, 5], rows="all", channels="value"), (3, 5), strict=True
    ):
        expected = strong_rrqr(x.transpose(1, 2).double(), width)
        assert torch.equal(selection.tensors["values.kept"], expected.kept)
        assert selection.value_change().width == width
        assert selection.change() is None
        assert (selection.tensors["values.effective_rank_after"] <= width).all()


def test_l1_is_the_row_that_makes_times_the_column_that_reads(calibrated):
    checkpoint = calibrated.checkpoint
    kind, shape = checkpoint.architecture, checkpoint.shape
    (selection,) = select("l1", ModelStatistics(checkpoint), [4], channels="value")
    assert selection.tensors.keys() == {"values.kept", "values.scores"}  # it needs no text
    (fisher,) = select("fisher", calibrated, [2], channels="value")
    assert torch.equal(fisher.tensors["values.scores"], calibrated.fisher("v"))
    for index, module in enumerate(mixers(load(checkpoint.folder))[2]):
        norm, o_proj = (module.get_parameter(name).detach() for name in (kind.norm, kind.o_proj))
        rows = module.get_parameter(kind.v_proj.name).detach()[kind.v_proj.places(shape)[0]]
        columns = o_proj.unflatten(1, shape.size("value")) * norm
        scores = rows.abs().sum(-1).double() * columns.abs().sum(0)
        found = selection.tensors["values.scores"][index]
        torch.testing.assert_close(found, scores, rtol=1e-6, atol=0)
        best = scores.topk(4).indices.sort().values
        assert torch.equal(selection.tensors["values.kept"][index], best)


def test_it_is_done_as_documented(tmp_path, monkeypatch):
    workplace(tmp_path, model=SMALL["gated"])
    (tmp_path / "text.jsonl").rename(tmp_path / "corpus.jsonl")
    monkeypatch.chdir(tmp_path)
    (block,) = readme.python_blocks("docs/values.md")
    names = {}
    exec(block, names)
    shape = mixers(names["smaller"])[1]
    assert (shape.width, shape.value_width) == (8, 8)


# Bad input


NORM = "model.layers.1.attn.o_norm."


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.update({f"{NORM}bias": torch.zeros(24)}),
     r"o_norm\.bias: values are cut only where the norm of the outputs has no bias"),
    (lambda t: t.update({f"{NORM}weight": torch.zeros(48)}),
     r"o_norm\.weight is \[48\], and its config says \[24\]"),
    (lambda t: t.pop(f"{NORM}weight"), "no .*o_norm.weight, so its channels"),
])  # fmt: skip
def test_a_model_whose_values_cannot_be_cut_is_refused_before_any_work(
    folders, tmp_path, change, message
):
    checkpoint = Checkpoint(rewritten(folders / "gated", tmp_path / "model", change))
    check_sliceable(checkpoint)  # by keys it can be
    for refused in (
        lambda: slice_model(checkpoint, None, tmp_path / "out", values=some(checkpoint.shape, 5)),
        lambda: select("l1", ModelStatistics(checkpoint), [5], channels="value"),
    ):
        with pytest.raises(InputError, match=message):
            refused()
    assert not (tmp_path / "out").exists()
