"""Every method against its formula, written out head by head."""

import math
from dataclasses import replace

import numpy as np
import pytest
import readme
import torch
from slow_rrqr import strong_rrqr_slow
from small_models import SMALL

from statecut.errors import InputError
from statecut.models import create, load, save
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate
from statecut.pruning.methods import METHODS
from statecut.pruning.select import select, top
from statecut.pruning.statistics import ModelStatistics

TARGETS = ["kq", "k", "q"]
IDS = torch.randint(0, 97, (6, 80), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module", params=["delta_net", "gated_value_heads"])
def made(request, tmp_path_factory):
    """A model, its calibration, and the keys and queries that went into it."""
    folder = tmp_path_factory.mktemp("selection") / "model"
    save(create(SMALL[request.param], seed=6), folder)
    checkpoint = Checkpoint(folder)
    provenance = {"model_digest": checkpoint.digest()}
    found = calibrate(load(folder), [IDS], sample_rows=200,
                      provenance=provenance)  # fmt: skip
    return checkpoint, found


def weights(checkpoint, side, layer):
    """(heads, d_k, hidden)"""
    tensor = checkpoint.tensor(f"model.layers.{layer}.attn.{side}_proj.weight").double()
    return tensor.view(checkpoint.shape.heads, checkpoint.shape.width, -1)


def chosen(method, made, width, target="kq", **options):
    checkpoint, calibration = made
    model = ModelStatistics(checkpoint, calibration)
    (selection,) = select(method, model, [width], target=target, **options)
    return selection.tensors


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", ["l1", "s_wanda", "grad", "fisher"])
def test_scores_are_those_of_the_formula(made, method, target):
    checkpoint, calibration = made
    found = chosen(method, made, 3, target=target)["scores"]
    for layer in range(2):
        norms = calibration.tensors["input_norm"][layer]
        for head in range(checkpoint.shape.heads):
            for channel in range(checkpoint.shape.width):
                expected = 0.0
                for side in target:
                    row = weights(checkpoint, side, layer)[head, channel].abs()
                    if method == "l1":
                        expected += row.sum().item()
                    elif method == "s_wanda":
                        expected += (row * norms).sum().item()
                    else:
                        name = {"grad": "saliency", "fisher": "fisher"}[method]
                        expected += calibration.tensors[f"{name}.{side}"][
                            layer, head, channel
                        ].item()
                assert found[layer, head, channel].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", ["sample", "all"])
@pytest.mark.parametrize("activations", ["raw", "normalised"])
def test_drrqr_is_the_slow_strong_rrqr_of_the_activations(made, target, rows, activations):
    checkpoint, calibration = made
    given = {"target": target, "rows": rows, "activations": activations, "f": 1.05}
    found = chosen("drrqr", made, 3, **given)
    for layer in range(2):
        for head in range(checkpoint.shape.heads):
            gram = sum(calibration.gram(side, rows, activations)[layer, head] for side in target)
            R = torch.linalg.cholesky(gram).mT.numpy()
            slow = strong_rrqr_slow(R, 3, 1.05)
            assert found["log_volume"][layer, head].item() == pytest.approx(
                slow.log_volume.item(), abs=1e-8
            )
            assert found["largest_gain"][layer, head] <= 1.05 * (1 + 1e-9)


def test_qrcp_is_drrqr_without_swaps(made):
    plain = chosen("qrcp", made, 3)
    assert (plain["swaps"] == 0).all()
    strong = chosen("drrqr", made, 3, f=1.0)
    assert (strong["log_volume"] >= plain["log_volume"] - 1e-12).all()


@pytest.mark.parametrize("target", TARGETS)
def test_pca_keeps_the_strongest_and_weakest_directions(made, target):
    _, calibration = made
    second = sum(calibration.gram(side, "all", "raw") for side in target) / IDS.numel()
    width = 3
    for method, wanted in (("pca_proper", slice(-width, None)), ("pca_adversarial", slice(width))):
        T = chosen(method, made, width, target=target)["rotation"]
        torch.testing.assert_close(T @ T.mT, torch.eye(width).expand_as(T @ T.mT).double())
        variance = (T @ second @ T.mT).diagonal(dim1=-2, dim2=-1).sort(-1).values
        values = torch.linalg.eigvalsh(second)[..., wanted]
        torch.testing.assert_close(variance, values, rtol=1e-8, atol=1e-10)


def test_rand_is_seeded_nested_and_fair(made):
    checkpoint, _ = made
    two, four = select("rand", ModelStatistics(checkpoint), [2, 4], seed=1)
    again, _ = select("rand", ModelStatistics(checkpoint), [2, 4], seed=1)
    other, _ = select("rand", ModelStatistics(checkpoint), [2, 4], seed=2)
    assert torch.equal(two.tensors["kept"], again.tensors["kept"])
    assert not torch.equal(two.tensors["kept"], other.tensors["kept"])
    small, large = two.tensors["kept"], four.tensors["kept"]
    assert (small[..., :, None] == large[..., None, :]).any(-1).all()
    counts = np.zeros(checkpoint.shape.width)
    for seed in range(300):
        (sampled,) = select("rand", ModelStatistics(checkpoint), [2], seed=seed)
        counts += np.bincount(sampled.tensors["kept"].flatten(), minlength=len(counts))
    expected = counts.sum() / len(counts)
    assert (np.abs(counts - expected) < 5 * math.sqrt(expected)).all()


def test_the_readmes_method_is_its_formula(made, monkeypatch):
    code = {}
    exec(readme.method_file(), code)
    (ghost,) = code["METHODS"]
    monkeypatch.setitem(METHODS, "ghost", ghost)
    _, calibration = made
    k, q = (calibration.gram(side, "all", "raw") / IDS.numel() for side in "kq")
    expected = torch.einsum("lhii->lhi", k) * torch.einsum("lhii->lhi", q)
    torch.testing.assert_close(chosen("ghost", made, 3)["scores"], expected)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("drrqr", {"rows": "some"}, "rows some: must be sample or all"),
        ("drrqr", {"f": math.nan}, "f nan: must be at least 1"),
        ("qrcp", {"f": 1.5}, "f 1.5: method qrcp takes no f; it takes rows, activations"),
        ("l1", {"f": 1.5}, "f 1.5: method l1 takes no f; it takes no options"),
        ("l1", {"target": "kv"}, "target kv: method l1 judges by kq or k or q"),
    ],
)
def test_options_that_are_none_are_refused(made, method, options, message):
    with pytest.raises(InputError, match=message):
        chosen(method, made, 3, **options)


def test_what_decided_is_recorded(made):
    recorded = {}
    for method in METHODS:
        (selection,) = select(method, ModelStatistics(*made), [2], seed=5)
        recorded[method] = {k: selection.about.get(k) for k in ("seed", "rows", "activations", "f")}
    given = {"seed": None, "rows": "sample", "activations": "raw"}
    assert recorded.pop("drrqr") == {**given, "f": 1.5}
    assert recorded.pop("qrcp") == {**given, "f": None}
    assert recorded.pop("rand") == {**dict.fromkeys(recorded["l1"]), "seed": 5}
    assert all(value is None for one in recorded.values() for value in one.values())


def test_of_equal_scores_the_lower_channel_stays():
    assert top(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]), 2).tolist() == [1, 2]


def test_conditioning_is_that_of_the_kept_keys(made):
    _, calibration = made
    gram = calibration.gram("k", "all", "raw")
    for method in METHODS:
        found = chosen(method, made, 4)
        for layer in range(2):
            for head in range(2):
                R = torch.linalg.cholesky(gram[layer, head]).mT
                if "kept" in found:
                    after = R[:, found["kept"][layer, head]]
                else:
                    after = R @ found["rotation"][layer, head].mT
                for when, matrix in (("before", R), ("after", after)):
                    sigma = torch.linalg.svdvals(matrix)
                    rank = (sigma.square().sum() / sigma[0].square()).item()
                    condition = (sigma[0] / sigma[-1]).item()
                    assert found[f"effective_rank_{when}"][layer, head].item() == pytest.approx(
                        rank
                    )
                    assert found[f"condition_{when}"][layer, head].item() == pytest.approx(
                        condition, rel=1e-4
                    )


def test_widths_asked_for_together_are_those_asked_for_alone(made):
    checkpoint, calibration = made
    for method in METHODS:
        model = ModelStatistics(checkpoint, calibration)
        together = select(method, model, [2, 5])
        for width, selection in zip((2, 5), together, strict=True):
            (alone,) = select(method, model, [width])
            assert alone.about == selection.about
            for name, tensor in alone.tensors.items():
                assert torch.equal(tensor, selection.tensors[name]), (method, name)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_without_its_calibration_is_refused(made, method):
    checkpoint, _ = made
    if "text" not in METHODS[method].needs:
        (selection,) = select(method, ModelStatistics(checkpoint), [2])
        assert "condition_after" not in selection.tensors
    else:
        with pytest.raises(InputError, match="method needs a calibration"):
            select(method, ModelStatistics(checkpoint), [2])


@pytest.mark.parametrize("method", ["grad", "fisher"])
def test_gradients_that_are_not_there_are_refused(made, method):
    checkpoint, calibration = made
    some = {n: t for n, t in calibration.tensors.items() if n[:6] not in ("salien", "fisher")}
    with pytest.raises(InputError, match="was not measured: calibrate with gradients=True"):
        select(method, ModelStatistics(checkpoint, replace(calibration, tensors=some)), [2])


def test_a_calibration_of_another_model_is_refused(made, tmp_path):
    _, calibration = made
    save(create(SMALL["delta_net"], seed=99), tmp_path / "other")
    with pytest.raises(InputError, match="calibrate it again"):
        select("l1", ModelStatistics(Checkpoint(tmp_path / "other"), calibration), [2])


@pytest.mark.parametrize("scores", [torch.full((2, 2, 8), math.nan), torch.zeros(2, 8)])
def test_scores_that_rank_nothing_are_refused(made, monkeypatch, scores):
    broken = replace(METHODS["l1"], score=lambda model, target: scores)
    monkeypatch.setitem(METHODS, "l1", broken)
    with pytest.raises(InputError, match=r"method l1: its scores are .* expected finite numbers"):
        chosen("l1", made, 3)
