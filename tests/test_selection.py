"""Every method against its formula, written out head by head, and all widths in one file."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
import readme
import torch
from slow_rrqr import strong_rrqr_slow
from small_models import SMALL

from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint, create, save
from statecut.pruning.calibration import calibrate
from statecut.pruning.methods import METHODS
from statecut.pruning.select import select, top
from statecut.pruning.selection import load_selection, save_selections
from statecut.pruning.statistics import ModelStatistics

TARGETS = ["kq", "k", "q"]
IDS = torch.randint(0, 97, (6, 80), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module", params=["delta_net", "gated_value_heads", "qwen3_5_tied"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection") / "model"
    save(create(SMALL[request.param], seed=6), folder)
    checkpoint = Checkpoint(folder)
    calibration = calibrate(checkpoint, [IDS], sample_rows=200, values=True)
    return ModelStatistics(checkpoint, calibration)


def chosen(method, made, width, target="kq", **options):
    side = {"channels": "value"} if target == "v" else {"target": target}
    (selection,) = select(method, made, [width], **side, **options)
    return {name.removeprefix("values."): tensor for name, tensor in selection.tensors.items()}


def magnitudes(made, side, layer):
    """|W|, (heads, channels, hidden); of values times the columns that read them."""
    kind, shape = made.checkpoint.architecture, made.checkpoint.shape
    part = {"q": kind.q_proj, "k": kind.k_proj, "v": kind.v_proj}[side]
    W, norm, o_proj = (
        made.checkpoint.tensor(kind.name(shape.layers[layer], name)).double()
        for name in (part, kind.norm, kind.o_proj)
    )
    readers = (o_proj.unflatten(1, shape.size("value")) * norm).abs().sum(0)[..., None]
    return W[part.places(shape)[0]].abs() * (readers if side == "v" else 1)


FORMULAS = {  # of keys, queries or values of one layer: (heads, channels)
    "l1": lambda made, *at: magnitudes(made, *at).sum(-1),
    "s_wanda": lambda made, *at: magnitudes(made, *at) @ made.input_norms[at[1]],
    "grad": lambda made, side, layer: made.saliency(side)[layer],
    "fisher": lambda made, side, layer: made.fisher(side)[layer],
    "ghost": lambda made, side, layer: made.gram(side)[layer].diagonal(dim1=-2, dim2=-1),
}


@pytest.mark.parametrize("target", [*TARGETS, "v"])
@pytest.mark.parametrize("method", FORMULAS)
def test_scores_are_those_of_the_formula(made, monkeypatch, method, target):
    """Ghost is the README's."""
    code = {}
    exec(readme.method_file(), code)
    monkeypatch.setitem(METHODS, "ghost", code["METHODS"][0])
    if target not in METHODS[method].targets and not (target == "v" and METHODS[method].values):
        pytest.skip("it does not judge by them")
    found = chosen(method, made, 3, target=target)["scores"]
    for layer in range(2):
        sides = torch.stack([FORMULAS[method](made, side, layer) for side in target])
        expected = sides.prod(0) / IDS.numel() ** 2 if method == "ghost" else sides.sum(0)
        torch.testing.assert_close(found[layer], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("rows", ["sample", "all"])
@pytest.mark.parametrize(
    ("target", "activations"), [*product(TARGETS, ("raw", "normalised")), ("v", "raw")]
)
def test_drrqr_is_the_slow_strong_rrqr_of_the_activations(made, target, rows, activations):
    given = {"target": target, "rows": rows, "activations": activations, "f": 1.05}
    found = chosen("drrqr", made, 3, **given)
    for layer in range(2):
        for head in range(len(found["log_volume"][layer])):
            gram = sum(made.gram(side, rows, activations)[layer, head] for side in target)
            R = torch.linalg.cholesky(gram).mT.numpy()
            slow = strong_rrqr_slow(R, 3, 1.05)
            assert found["log_volume"][layer, head].item() == pytest.approx(
                slow.log_volume.item(), abs=1e-8
            )
            assert found["largest_gain"][layer, head] <= 1.05 * (1 + 1e-9)


@pytest.mark.parametrize("target", TARGETS)
def test_pca_keeps_the_strongest_and_weakest_directions(made, target):
    second = sum(made.gram(side) for side in target) / IDS.numel()
    width = 3
    for method, wanted in (("pca_proper", slice(-width, None)), ("pca_adversarial", slice(width))):
        T = chosen(method, made, width, target=target)["rotation"]
        torch.testing.assert_close(T @ T.mT, torch.eye(width).expand_as(T @ T.mT).double())
        variance = (T @ second @ T.mT).diagonal(dim1=-2, dim2=-1).sort(-1).values
        values = torch.linalg.eigvalsh(second)[..., wanted]
        torch.testing.assert_close(variance, values, rtol=1e-8, atol=1e-10)


def test_rand_is_seeded_and_nested(made):
    checkpoint = made.checkpoint
    two, four = select("rand", ModelStatistics(checkpoint), [2, 4], seed=1)
    again, _ = select("rand", ModelStatistics(checkpoint), [2, 4], seed=1)
    other, _ = select("rand", ModelStatistics(checkpoint), [2, 4], seed=2)
    assert torch.equal(two.tensors["kept"], again.tensors["kept"])
    assert not torch.equal(two.tensors["kept"], other.tensors["kept"])
    small, large = two.tensors["kept"], four.tensors["kept"]
    assert (small[..., :, None] == large[..., None, :]).any(-1).all()


@pytest.mark.parametrize("channels", ["key", "value"])
@pytest.mark.parametrize("method", METHODS)
def test_a_width_of_the_file_is_the_selection_of_that_width(made, tmp_path, method, channels):
    if channels == "value" and not METHODS[method].values:
        pytest.skip("it chooses no value channels")
    _, full = made.checkpoint.shape.size(channels)
    every = select(method, made, range(1, full), channels=channels)
    for name in ("again.safetensors", "s.safetensors"):
        save_selections(every, tmp_path / name)
    again, first = (path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert again == first
    for width in range(1, full):
        (alone,) = select(method, made, [width], channels=channels)
        again = load_selection(tmp_path / "s.safetensors", keys=width, values=width)
        again.check_model(made.checkpoint)
        assert again.about == json.loads(json.dumps(alone.about))
        assert again.tensors.keys() == alone.tensors.keys()
        for name, tensor in alone.tensors.items():
            assert torch.equal(again.tensors[name], tensor), name


def test_what_cannot_choose_is_refused(made, tmp_path, monkeypatch):
    assert top(torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0]), 2).tolist() == [1, 2]  # of equals the lower
    checkpoint, found = made.checkpoint, made.calibration
    (selection,) = select("l1", ModelStatistics(checkpoint), [2])
    assert "condition_after" not in selection.tensors
    nan = replace(
        METHODS["l1"], score=lambda *_: torch.full((2, *checkpoint.shape.size("key")), math.nan)
    )
    monkeypatch.setitem(METHODS, "nan", nan)
    monkeypatch.setitem(METHODS, "flat", replace(nan, score=lambda *_: torch.zeros(2, 8)))
    keys = {n: t for n, t in found.tensors.items() if n.startswith(("input", "gram.k", "gram.q"))}
    keys = ModelStatistics(checkpoint, replace(found, tensors=keys))
    save(create(SMALL["delta_net"], seed=99), tmp_path / "other")
    other = ModelStatistics(Checkpoint(tmp_path / "other"), found)
    for method, model, options, message in (
        ("drrqr", ModelStatistics(checkpoint), {}, "method needs a calibration"),
        ("fisher", keys, {}, "was not measured: calibrate with gradients=True"),
        ("drrqr", keys, {"channels": "value"}, "was not measured: calibrate with values=True"),
        ("l1", other, {}, "calibrate it again"),
        ("nan", made, {}, "its scores are .* expected finite numbers"),
        ("flat", made, {}, "its scores are .* expected finite numbers"),
        ("drrqr", made, {"f": math.nan}, "f nan: must be at least 1"),
        ("qrcp", made, {"f": 1.5}, "f 1.5: method qrcp takes no f; it takes rows, activations"),
        ("l1", made, {"target": "kv"}, "target kv: method l1 judges by kq or k or q"),
    ):
        with pytest.raises(InputError, match=message):
            select(method, model, [2], **options)
