"""What slicing writes: padded, in shards, in another process, and what it refuses."""

import json
import math
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_models import SMALL, WITH_EXPERTS, logits, relative, rewritten, some, widths

from statecut.errors import InputError
from statecut.models.architectures import ARCHITECTURES
from statecut.models.capture import mixers
from statecut.models.checkpoint import Checkpoint, load, open_safetensors, save
from statecut.pruning.select import select
from statecut.pruning.slicing import (
    Pad,
    Rotate,
    check_sliceable,
    cut_back,
    slice_model,
)
from statecut.pruning.statistics import ModelStatistics
from statecut.recovery.training import scale_eps

IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name in SMALL if name not in WITH_EXPERTS])
def test_zero_padding_is_exact_and_stays_so_in_training(folders, tmp_path, name):
    """But for experts: rounding chooses another one, and the models go ways of their own."""
    checkpoint = Checkpoint(folders / name)
    shape = checkpoint.shape
    padding, padded = Pad(shape.width + 5), replace(shape, width=shape.width + 5)
    slice_model(checkpoint, padding, tmp_path / "wide", dtype=None, eps="kept")
    narrow, wide = load(folders / name), load(tmp_path / "wide")
    scale_eps(
        wide, checkpoint.architecture.eps_factor(shape, padded)
    )  # in memory, as recovery does
    assert relative(logits(wide, IDS), logits(narrow, IDS)) < 1e-6

    for model in (narrow, wide):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, weight_decay=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
        model.eval()
    assert relative(logits(wide, IDS), logits(narrow, IDS)) < 1e-3  # rounding, grown over steps
    kind, shape_wide, modules = mixers(wide)
    for mixer in modules:
        for key in (kind.q_proj, kind.k_proj):
            rows = torch.from_numpy(key.places(shape_wide)[0])[:, shape.width :]
            assert (mixer.get_parameter(key.name)[rows] == 0).all()

    save(wide, tmp_path / "trained")
    trained, first = Checkpoint(tmp_path / "trained"), cut_back(shape, shape.width)
    slice_model(trained, first, tmp_path / "back", dtype=None, eps="kept")
    assert relative(logits(load(tmp_path / "back"), IDS), logits(narrow, IDS)) < 1e-3


def test_rotations_of_filters_are_squared():
    T, W = torch.linalg.qr(torch.randn(1, 2, 5, 5)).Q[..., :3, :], torch.randn(2, 5, 4)
    rows, filters = (Rotate(T)(0, role, W) for role in ("projection", "filter"))
    torch.testing.assert_close(rows, T[0] @ W)
    torch.testing.assert_close(filters, T[0] ** 2 @ W)


LOGITS = """
import sys, torch, fla.models
from transformers import AutoModelForCausalLM
ids, out, *folders = sys.argv[1:]
for folder in folders:
    if "shared" not in folder and "glm5_next" not in folder:  # whose class is statecut's
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
from statecut.models.checkpoint import load
torch.set_num_threads(1)
torch.save({folder: load(folder)(torch.load(ids)).logits.detach() for folder in folders}, out)
"""


ROTATED = ("delta_net", "gated", "qwen3_next")


def test_models_load_plainly_and_give_the_same_logits_in_a_new_process(folders, tmp_path):
    """Whole, cut, and three of them rotated; nothing may be missing, left over, or of another
    shape."""
    made = [folders / name for name in SMALL]
    for name in SMALL:
        checkpoint = Checkpoint(folders / name)
        shape, layers = checkpoint.shape, len(checkpoint.shape.layers)
        rotation = torch.linalg.qr(torch.rand(layers, shape.heads, shape.width, shape.width)).Q
        width, value_width = widths(name, 3, 5)
        rotated = [Rotate(rotation[..., :width, :])] if name in ROTATED else []
        for keys in (some(shape, width, "key"), *rotated):
            made.append(tmp_path / f"{name}-{type(keys).__name__}")
            slice_model(checkpoint, keys, made[-1], values=some(shape, value_width), dtype=None)
            found = Checkpoint(made[-1]).shape
            assert (found.width, found.value_width) == (width, value_width)
    torch.set_num_threads(1)
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [tmp_path / "ids.pt", tmp_path / "logits.pt", *made]
    subprocess.run([sys.executable, "-c", LOGITS, *map(str, arguments)], check=True)
    for folder, values in torch.load(tmp_path / "logits.pt").items():
        # Some kernels round the last bit otherwise once other tests ran in this process.
        assert relative(logits(load(folder), IDS), values) < 1e-6, folder


@pytest.mark.parametrize("name", SMALL)
def test_shards_are_sliced_as_one_file_is_and_stay_shards(folders, tmp_path, name):
    load(folders / name).save_pretrained(tmp_path / "shards", max_shard_size="9KB")
    one, many = Checkpoint(folders / name), Checkpoint(tmp_path / "shards")
    assert len(many.shards()) > 2
    width, value_width = widths(name, 5, 6)
    keys, values = some(one.shape, width, "key"), cut_back(one.shape, value_width, "value")
    changes = {"keys": keys, "values": values}
    for dtype in (None, torch.bfloat16):
        for model, out in ((one, tmp_path / "one"), (many, tmp_path / "many")):
            slice_model(model, **changes, out=out, dtype=dtype, force=True)
        expected, found = (Checkpoint(tmp_path / n) for n in ("one", "many"))
        assert found.files == many.files
        assert found.config == expected.config
        tensors, others = dict(expected.tensors()), dict(found.tensors())
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
        index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
        size = sum(tensor.nbytes for tensor in tensors.values())
        numbers = sum(tensor.numel() for tensor in tensors.values())
        assert index["metadata"] == {"total_size": size, "total_parameters": numbers}
        for file in found.shards():
            with open_safetensors(found.folder / file) as opened:
                assert opened.metadata() == {"format": "pt"}


def test_one_shard_at_a_time_is_in_memory(folders, tmp_path, monkeypatch):
    load(folders / "gated").save_pretrained(tmp_path / "shards", max_shard_size="9KB")
    checkpoint, written = Checkpoint(tmp_path / "shards"), []

    def save(tensors, path, metadata):
        written.extend((name, weakref.ref(tensor)) for name, tensor in tensors.items())
        save_file(tensors, path, metadata)

    class Checked(Pad):
        def __call__(self, *args):
            assert not [name for name, tensor in written if tensor() is not None]
            return super().__call__(*args)

    monkeypatch.setattr("statecut.models.checkpoint.save_file", save)
    slice_model(checkpoint, Checked(20), tmp_path / "out")
    assert {name for name, _ in written} == set(checkpoint.files)


K_PROJ, NORM = "model.layers.1.attn.k_proj.weight", "model.layers.1.attn.o_norm."


@pytest.mark.parametrize(("change", "message"), [
    ({"head_dim": 8, "expand_v": 3.0}, "32 key channels, but the config says 2 heads of 8"),
    ({"expand_v": 1.0}, "v_proj.weight has 48 value channels, but the config says 2 heads"),
    ({"num_hidden_layers": 3}, "its config says 3 layers, and its files hold 2"),
    ({"vocab_size": 5}, r"embeddings.weight is .* config says \[5, .*\]"),
    (lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.float8_e4m3fn)}), "float8_e4m3fn: quantised"),
    (lambda t: t.update({K_PROJ: t[K_PROJ][:30].clone()}), "layers differ in width, which cannot"),
    (lambda t: t.update({f"{NORM}bias": torch.zeros(24)}), "the norm of the outputs has no bias"),
    (lambda t: t.update({f"{NORM}weight": torch.zeros(48)}), r"weight is \[48\], and its con"),
    (lambda t: t.pop(f"{NORM}weight"), "no .*o_norm.weight, so its channels"),
])  # fmt: skip
def test_what_cannot_be_sliced_is_refused(folders, tmp_path, change, message):
    change = change if isinstance(change, dict) else {"change": change}
    checkpoint = Checkpoint(rewritten(folders / "gated", tmp_path / "model", **change))
    if "norm" in message:
        check_sliceable(checkpoint)  # by keys it can be
    for refused in (
        lambda: slice_model(checkpoint, None, tmp_path / "out", values=some(checkpoint.shape, 5)),
        lambda: select("l1", ModelStatistics(checkpoint), [5], channels="value"),
    ):
        with pytest.raises(InputError, match=message):
            refused()
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_the_old_folder(folders, tmp_path, monkeypatch):
    checkpoint, out = Checkpoint(folders / "delta_net"), tmp_path / "out"
    slice_model(checkpoint, some(checkpoint.shape, 4, "key"), out)
    before = Checkpoint(out).digest()

    def fails(*_args, **_kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("statecut.models.checkpoint.save_file", fails)
    with pytest.raises(OSError, match="Input/output error"):
        slice_model(checkpoint, Pad(20), out, force=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing lies about
    assert Checkpoint(out).digest() == before
    # Where only the rename fails, the new model is kept beside it.
    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(InputError) as caught:
        slice_model(checkpoint, Pad(20), out, force=True)
    assert "out cannot be put in place: [Errno 5] Input/output error" in str(caught.value)
    made = Path(str(caught.value).split("kept as ")[1])
    assert Checkpoint(out).digest() == before
    assert Checkpoint(made).shape.width == 20
    assert [path.name for path in made.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_fla_reads_every_pair_of_widths_from_the_config(name):
    """It takes int(head_dim * expand_v), and wants the product near a whole number."""
    kind = ARCHITECTURES[name]
    config = {"model_type": name, "num_heads": 2, "head_dim": 256, "hidden_size": 8,
              "num_hidden_layers": 1, "expand_v": 1.0}  # fmt: skip
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
