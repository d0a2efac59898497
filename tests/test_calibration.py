"""One pass, compared with the same statistics from the plain model and all rows at once."""

import importlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_model import plain_logits
from small_models import HYBRIDS, SMALL

from statecut.errors import InputError
from statecut.models.capture import mixers
from statecut.models.checkpoint import Checkpoint, create, load, save
from statecut.models.kernels import check_gradients
from statecut.models.loaded import Loaded
from statecut.pruning.calibration import Calibration, calibrate, sampled_positions

NAMES = ["delta_net", "shared_head", "gated", "gated_value_heads", "kda_value_heads"]
ROWS, SEED = 50, 11


SHAPES = ((3, 70), (2, 40), (1, 90))  # one too short for the chunked kernels
TOKENS = 3 * 70 + 2 * 40 + 90


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, shape, generator=generator) for shape in SHAPES]


@pytest.fixture(scope="module", params=NAMES)
def both(request):
    """A model's calibration and the slow obvious one."""
    model = create(SMALL[request.param], seed=2)
    found = calibrate(Loaded(model), batches(), sample_rows=ROWS, seed=SEED)
    return model, found, slow(model)


def slow(model):
    """All rows of all layers held at once; gradients of the mean loss over all tokens."""
    rows = {}

    def seen(layer, x, q, k):
        for name, value in (("x", x), ("q", q), ("k", k)):
            rows.setdefault((name, layer), []).append(value.detach().double())

    loss = torch.zeros(())
    for batch in batches():
        for ids in batch:
            logits = plain_logits(model, ids, seen)
            per_token = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
            loss = loss + per_token * len(ids) / TOKENS
    layers = range(model.config.num_hidden_layers)
    weights = {
        (side, i): getattr(model.model.layers[i].attn, f"{side}_proj").weight
        for side in "qk"
        for i in layers
    }
    gradients = torch.autograd.grad(loss, list(weights.values()))
    stacked = {key: torch.cat(value) for key, value in rows.items()}
    salient = {
        key: (w * g).abs().sum(1).detach().double()
        for (key, w), g in zip(weights.items(), gradients, strict=True)
    }
    return stacked, salient


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_statistics_are_those_of_all_rows(both):
    _, found, (rows, salient) = both
    some = sampled_positions(TOKENS, ROWS, SEED)
    for side in ("k", "q"):
        for layer in range(2):
            X = rows[side, layer].transpose(0, 1)  # (heads, tokens, d_k)
            unit = X / (X.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for activations, M in (("raw", X), ("normalised", unit)):
                close(found.gram(side, "all", activations)[layer], M.mT @ M)
                sample = M[:, some]
                close(found.gram(side, "sample", activations)[layer], sample.mT @ sample)
    for layer in range(2):
        close(found.tensors["input_norm"][layer], rows["x", layer].norm(dim=0))
    for (side, layer), expected in salient.items():
        close(found.tensors[f"saliency.{side}"][layer].flatten(), expected)


def slow_effects(model, batches):
    """Sequence by sequence: q and k as the rule receives them and v as the output projection does,
    and their products with the gradient of the summed loss."""
    kind, _, modules = mixers(model)
    module, call = importlib.import_module(kind.call.module), kind.call
    received, found = [], {}

    def kept(original):
        def rule(*args, **more):
            given = {**dict(zip(call.by_position, args, strict=False)), **more}
            received.append([given["q"], given["k"]])
            return original(*args, **more)

        return rule

    with pytest.MonkeyPatch.context() as patch:
        for name in call.functions:
            patch.setattr(module, name, kept(getattr(module, name)))
        for mixer in modules:
            o_proj = mixer.get_submodule(kind.o_proj.removesuffix(".weight"))
            o_proj.register_forward_pre_hook(lambda _, args: received[-1].append(args[0]))
        for ids in (row for batch in batches for row in batch):
            received.clear()
            logits = model(ids[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            for layer, tensors in enumerate(received):
                for side, x in zip("qkv", tensors, strict=True):
                    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
                    pair = (part.detach()[0].double().flatten(1) for part in (x, x * slope))
                    found.setdefault((side, layer), []).append([*pair])
    return {key: map(torch.cat, zip(*pairs, strict=True)) for key, pairs in found.items()}


@pytest.mark.parametrize("name", [*NAMES, *HYBRIDS])
def test_fisher_is_the_squared_effect_of_each_token(folders, name):
    """And values are what enters the output projection."""
    model = load(folders / name)
    shape = mixers(model)[1]
    given = {"sample_rows": ROWS, "seed": SEED, "values": True}
    found = calibrate(Loaded(model), batches(), **given).tensors
    for (side, layer), (x, effects) in slow_effects(model, batches()).items():
        if side == "v":
            x, effects = (part.unflatten(1, shape.size("value")) for part in (x, effects))
            for rows, X in (("gram", x), ("sample", x[sampled_positions(TOKENS, ROWS, SEED)])):
                close(found[f"{rows}.v.raw"][layer], torch.einsum("thi,thj->hij", X, X))
        else:  # the effects of value heads that have the same keys are summed
            effects = effects.unflatten(1, (shape.heads, -1, shape.width)).sum(2)
        close(found[f"fisher.{side}"][layer], effects.square().mean(0))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, None) for name in SMALL), ("gated", torch.bfloat16), ("qwen3_5", torch.bfloat16)],
)
def test_layer_by_layer_is_the_same(folders, name, dtype, monkeypatch):
    given = {"sample_rows": ROWS, "seed": SEED, "values": True}
    model = load(folders / name, dtype=dtype)
    monkeypatch.setattr(Checkpoint, "compute_dtype", lambda *_: model.dtype)
    expected = calibrate(Loaded(model), batches(), **given)
    found = calibrate(Checkpoint(folders / name), batches(), gradients=False, **given)
    gradients = {"saliency.k", "saliency.q", "fisher.k", "fisher.q", "fisher.v"}
    assert {*expected.tensors} - {*found.tensors} == gradients
    for key, tensor in found.tensors.items():
        assert torch.equal(expected.tensors[key], tensor), key
    differ = ("loss", "model_digest")
    assert found.manifest.keys() == expected.manifest.keys() - {"loss"}
    assert all(found.manifest[k] == v for k, v in expected.manifest.items() if k not in differ)


def test_the_model_is_left_as_it_was_and_the_result_survives_the_disk(both, tmp_path):
    model, found, _ = both
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.training
    found.save(tmp_path / "c")
    again = Calibration.load(tmp_path / "c")
    assert (again.manifest["seed"], again.manifest["sample_rows"]) == (SEED, ROWS)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in found.tensors.items())
    file = tmp_path / "c" / "calibration.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="not the file its manifest describes"):
        Calibration.load(tmp_path / "c")


def test_the_sample_is_taken_once_without_repetition():
    positions = sampled_positions(1000, 200, seed=3)
    assert len(np.unique(positions)) == 200
    assert (positions == sampled_positions(1000, 200, seed=3)).all()
    assert (positions != sampled_positions(1000, 200, seed=4)).any()
    assert len(sampled_positions(30, 200, seed=3)) == 30


ORIGINS = {
    "its keys": ("layers.1.attn.k_proj", "layer 1, head 1: gram.k.raw has NaN or infinity"),
    "its values": ("layers.1.attn.v_proj", "what enters layer 2 has .*what enters layer 1 has no"),
    "the embeddings": ("embeddings", "what enters layer 0 has NaN or infinity$"),
    "the last layer": ("layers.2.mlp.up_proj", "layer 2, head 0: saliency.q has"),
}


@pytest.mark.parametrize(
    ("case", "bad"), [*((case, math.nan) for case in ORIGINS), ("its keys", math.inf)]
)
def test_a_bad_number_is_named_where_it_comes_up_not_where_it_goes(case, bad, tmp_path):
    part, message = ORIGINS[case]
    model = create({**SMALL["delta_net"], "num_hidden_layers": 3}, seed=2)
    with torch.no_grad():
        model.get_submodule(f"model.{part}").weight[20, 0] = bad  # head 1 of two
    with pytest.raises(InputError, match=message):
        calibrate(Loaded(model), batches())
    if case != "the last layer":  # without gradients nothing is computed of what leaves it
        save(model, tmp_path / "model")
        with pytest.raises(InputError, match=message):
            calibrate(Checkpoint(tmp_path / "model"), batches(), gradients=False)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])  # a model in memory names its GPU
def test_gradients_that_would_be_wrong_are_refused_before_the_model_is_loaded(monkeypatch, device):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    check_gradients(device)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    check_gradients("cpu")
    with pytest.raises(InputError, match=r"Triton 3\.6\.0 .*: install .* or give --method drrqr"):
        check_gradients(device)
