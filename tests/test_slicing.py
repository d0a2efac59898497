"""What slicing writes: padded, in shards, in another process, and what it refuses."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import SMALL, logits, relative, rewritten, shard, some

from statecut.errors import InputError
from statecut.models import load, save
from statecut.models.capture import mixers
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.slicing import (
    Pad,
    Rotate,
    check_sliceable,
    cut_back,
    eps_factor,
    slice_model,
    sliced_sizes,
)
from statecut.recovery.training import scale_eps

IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name in SMALL if "num_experts" not in SMALL[name]])
def test_zero_padding_is_exact_and_stays_so_in_training(folders, tmp_path, name):
    """But for experts: rounding chooses another one, and the models go ways of their own."""
    checkpoint = Checkpoint(folders / name)
    shape = checkpoint.shape
    padding, padded = Pad(shape.width + 5), replace(shape, width=shape.width + 5)
    slice_model(checkpoint, padding, tmp_path / "wide", dtype=None, eps="kept")
    narrow, wide = load(folders / name), load(tmp_path / "wide")
    scale_eps(wide, eps_factor(shape, padded))  # in memory, as recovery does
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


LOGITS = """
import sys, torch
from statecut.models import load
torch.set_num_threads(1)
ids = torch.load(sys.argv[1])
torch.save({folder: load(folder)(ids).logits.detach() for folder in sys.argv[3:]}, sys.argv[2])
"""


def test_models_give_the_same_logits_in_a_new_process(folders, tmp_path):
    """Whole, cut and rotated."""
    made = []
    for name in SMALL:
        checkpoint = Checkpoint(folders / name)
        layers, heads, full = len(checkpoint.shape.layers), *checkpoint.shape.size("key")
        rotation = torch.linalg.qr(torch.rand(layers, heads, full, full)).Q[..., :5, :]
        for change in (some(checkpoint.shape, 5, "key"), Rotate(rotation)):
            made.append(tmp_path / f"{name}-{type(change).__name__}")
            slice_model(checkpoint, change, made[-1], dtype=None)
    torch.set_num_threads(1)
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [tmp_path / "ids.pt", tmp_path / "logits.pt", *made, *(folders / n for n in SMALL)]
    subprocess.run([sys.executable, "-c", LOGITS, *map(str, arguments)], check=True)
    for folder, values in torch.load(tmp_path / "logits.pt").items():
        # Some kernels round the last bit otherwise once other tests ran in this process.
        assert relative(logits(load(folder), IDS), values) < 1e-6, folder


def test_a_pruned_model_loads_with_plain_transformers(folders, tmp_path):
    """After `import fla.models` alone, in another process; on a CPU it can be loaded, not run."""
    checkpoint = Checkpoint(folders / "gated")
    slice_model(checkpoint, some(checkpoint.shape, 7, "key"), tmp_path / "out")
    code = (
        "import sys, fla.models; from transformers import AutoModelForCausalLM as A;"
        "m, i = A.from_pretrained(sys.argv[1], output_loading_info=True);"
        "assert not any(i.values()), i; a = m.model.layers[0].attn;"
        "print(a.head_k_dim, a.head_v_dim, m.dtype)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "out")]
    assert subprocess.check_output(command, text=True) == "7 24 torch.bfloat16\n"


@pytest.mark.parametrize("name", SMALL)
def test_shards_are_sliced_as_one_file_is_and_stay_shards(folders, tmp_path, name):
    one = Checkpoint(folders / name)
    many = Checkpoint(shard(folders / name, tmp_path / "shards"))
    changes = {"keys": some(one.shape, 5, "key"), "values": cut_back(one.shape, 6, "value")}
    cut = replace(one.shape, width=5, value_width=6)
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
        assert sliced_sizes(one, cut, dtype) == (numbers, size)
        sizes = {"total_size": size, "total_parameters": numbers}
        assert index["metadata"] == {**sizes, "note": "kept"}
        for i, file in enumerate(found.shards()):
            with safe_open(found.folder / file, "pt") as opened:
                assert opened.metadata() == {"format": "pt", "part": str(i)}


def test_one_shard_at_a_time_is_in_memory(folders, tmp_path, monkeypatch):
    checkpoint = Checkpoint(shard(folders / "gated", tmp_path / "shards"))
    written = []

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


def float8(tensors):
    name = "model.layers.1.attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def narrower(tensors):
    name = "model.layers.1.attn.k_proj.weight"
    tensors[name] = tensors[name][:30].clone()


@pytest.mark.parametrize(("change", "config", "message"), [
    (None, {"head_dim": 8, "expand_v": 3.0}, "32 key channels, but the config says 2 heads of 8"),
    (None, {"expand_v": 1.0}, "v_proj.weight has 48 value channels, but the config says 2 heads"),
    (None, {"num_hidden_layers": 3}, "its config says 3 layers, and its files hold 2"),
    (None, {"vocab_size": 5}, r"embeddings.weight is .* config says \[5, .*\]"),
    (None, {"head_dim": "16"}, "head_dim = '16': must be a whole number"),
    (float8, {}, "k_proj.weight is torch.float8_e4m3fn: quantised"),
    (narrower, {}, "layers differ in width, which cannot be sliced"),
])  # fmt: skip
def test_what_cannot_be_sliced_is_refused(folders, tmp_path, change, config, message):
    folder = rewritten(folders / "gated", tmp_path / "model", change or (lambda _: None), **config)
    with pytest.raises(InputError, match=message):
        check_sliceable(Checkpoint(folder))


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
