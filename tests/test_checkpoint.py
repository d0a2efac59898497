"""Models on disk: nothing left at its random start, nothing read that could run code."""

import json
import re
import shutil

import pytest
import torch
from small_models import ALL, SMALL, change_config, logits, rewritten
from transformers import AutoModelForCausalLM

from statecut.errors import InputError
from statecut.hub import HubItem, fetch
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import (
    Checkpoint,
    create,
    current_name,
    divide,
    link,
    load,
    read_tensors,
    rewrite,
    save,
    trained,
)
from statecut.pruning.slicing import cut_back, slice_model
from statecut.pruning.statistics import ModelStatistics

IDS = torch.arange(20)[None]


@pytest.fixture
def folder(tmp_path, folders):
    return rewritten(folders / "gated", tmp_path / "model")


def test_a_seed_gives_the_same_model_and_another_seed_another():
    first, again, other = (create(SMALL["shared_all"], seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    filters = "model.layers.0.attn.q_conv1d.weight"
    assert not torch.equal(first[filters], other[filters])


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_has_a_start_of_the_right_size(name):
    """Norms at one, matrices and filters with the spread that the config names; those of n-grams,
    streams and pooled keys have their own."""
    if name not in SMALL:
        pytest.skip(f"no test has this model: {ARCHITECTURES[ALL[name]['model_type']].missing()}")
    spread = SMALL[name]["initializer_range"]
    for key, parameter in create(SMALL[name], seed=1).named_parameters():
        own = r"bias$|ple.conv1d|_hc\.|index_kpool"
        if parameter.numel() > 100 and not re.search(own, key):
            assert parameter.std().item() == pytest.approx(spread, rel=0.25), key
        assert parameter.abs().max().item() < 10, key


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.layers.1.attn.A_log"), r"Missing key.*model\.layers\.1\.attn\.A_log"),
    (lambda t: t.update(more=torch.zeros(3)), r"Unexpected key.*more"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(97, 31)}),
     r"lm_head\.weight: .*\[97, 31\].*\[97, 32\]"),
])  # fmt: skip
def test_a_parameter_that_does_not_fit_is_named(folders, tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        load(rewritten(folders / "gated", tmp_path / "model", change))


def test_names_of_older_versions_are_understood(folders, tmp_path):
    def older(tensors):
        for i in range(2):
            at = f"model.layers.{i}."
            tensors[f"{at}attn.D"] = torch.ones(2)
            tensors[f"{at}attn.norm.weight"] = tensors.pop(f"{at}attn_norm.weight")
            tensors[f"{at}mlp.norm.weight"] = tensors.pop(f"{at}mlp_norm.weight")
            gate, up = (tensors.pop(f"{at}mlp.{n}_proj.weight") for n in ("gate", "up"))
            tensors[f"{at}mlp.gate_proj.weight"] = torch.cat([gate, up])
        for name in list(tensors):
            tensors[f"_orig_mod.{name}"] = tensors.pop(name)

    old, new = rewritten(folders / "gated", tmp_path / "old", older), folders / "gated"
    assert torch.equal(logits(load(old), IDS), logits(load(new), IDS))
    weights = [ModelStatistics(Checkpoint(f)).weight_magnitudes("k") for f in (old, new)]
    assert torch.equal(*weights)


def test_wrappers_are_taken_off_in_any_order():
    name = "model.layers.1.attn.q_proj.weight"
    inside = "module.model.layers.1._orig_mod.attn.q_proj.weight"
    for wrapped in (inside, f"_orig_mod.base_model.model.module._orig_mod.{name}"):
        assert current_name(wrapped, ARCHITECTURES["delta_net"]) == name


def test_a_model_with_something_that_no_file_holds_is_refused(folder, monkeypatch):
    """As the angles of softmax attention, which are made where the model is, on no device yet."""
    from fla.models.gated_deltanet import GatedDeltaNetModel

    made = GatedDeltaNetModel.__init__

    def with_angles(self, config):
        made(self, config)
        self.register_buffer("angles", torch.ones(4), persistent=False)

    monkeypatch.setattr(GatedDeltaNetModel, "__init__", with_angles)
    with pytest.raises(InputError, match=r"model\.angles is in no file"):
        load(folder)


def test_a_downloaded_hub_model_loads_by_its_name(folder, hub):
    hub.push("model", "owner/net", folder)
    assert fetch([HubItem("model", "owner/net")]) == {}
    assert torch.equal(logits(load("owner/net"), IDS), logits(load(folder), IDS))
    with pytest.raises(InputError, match="model owner/other was not downloaded"):
        load("owner/other")


def test_code_that_comes_with_a_model_is_not_run(folder):
    code = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    change_config(folder, auto_map=code)
    (folder / "evil.py").write_text("raise SystemExit('code of the model ran')")
    assert type(load(folder)).__module__.startswith("fla.")


@pytest.fixture
def sharded(folder):
    """The same model in several files."""
    load(folder).save_pretrained(folder.parent / "shards", max_shard_size="20KB")
    return folder.parent / "shards"


def test_shards_are_read_as_one(folder, sharded):
    checkpoint = Checkpoint(sharded)
    assert len(checkpoint.shards()) > 1
    assert torch.equal(logits(load(sharded), IDS), logits(load(folder), IDS))
    headers = dict(checkpoint.headers())
    for name, tensor in checkpoint.tensors():
        assert headers[name].is_meta
        assert (headers[name].shape, headers[name].dtype) == (tensor.shape, tensor.dtype)


def test_an_index_or_shard_that_is_not_whole_is_refused_when_the_folder_is_opened(sharded):
    path, shard = sharded / "model.safetensors.index.json", Checkpoint(sharded).shards()[-1]
    text = path.read_text()
    files = json.loads(text)["weight_map"]
    for weight_map, message in (
        ({**files, "more": files["lm_head.weight"]}, "says that more is in model-.*, and it is no"),
        ({}, "0 of 0 files"),
        ({"lm_head.weight": "../model/model.safetensors"}, r"1 of 1 files .* missing \(\.\./model"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InputError, match=message):
            Checkpoint(sharded)
    path.write_text(text)
    (sharded / shard).write_bytes((sharded / shard).read_bytes()[:-100])
    with pytest.raises(InputError, match=f"{shard} is cut off or damaged"):
        Checkpoint(sharded)


def test_the_digest_tells_models_apart(folders, tmp_path):
    one = folders / "gated"
    same = rewritten(one, tmp_path / "same")
    other = rewritten(one, tmp_path / "other", lambda t: t["lm_head.weight"].add_(1e-3))
    digests = [Checkpoint(folder).digest() for folder in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("stored", "on_a_cpu"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_a_cpu_computes_no_16_bits_and_a_gpu_no_32(tmp_path, stored, on_a_cpu):
    save(create(SMALL["delta_net"], seed=0, dtype=stored), tmp_path / "model")
    model = Checkpoint(tmp_path / "model")
    assert model.compute_dtype("cpu") == on_a_cpu
    assert model.compute_dtype("cuda:1") == torch.bfloat16
    assert {p.dtype for p in load(model.folder, dtype=torch.float16).parameters()} == {
        torch.float16
    }


@pytest.mark.parametrize("name", SMALL)
def test_what_was_trained_is_written_where_files_hold_it(folders, tmp_path, name):
    """Whatever the files call it; the rest is what it was."""
    before, model = Checkpoint(folders / name), load(folders / name)
    kind = before.architecture
    parts = tuple(f".{part}." for part in (*kind.projections, *kind.convolutions))
    learning = {name for name, _ in model.named_parameters() if any(p in name for p in parts)}
    for learned in learning:
        model.get_parameter(learned).data.mul_(2)
    rewrite(before, tmp_path, trained(model, learning, before.shape))
    after = Checkpoint(tmp_path)
    assert after.files == before.files
    state = load(tmp_path).state_dict()
    assert learning
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["delta_net", "gated", "qwen3_next"])
def test_models_cut_from_one_share_the_file_of_what_no_cut_changes(folders, tmp_path, name):
    whole, cut, recovered = (tmp_path / part for part in ("whole", "cut", "recovered"))
    shutil.copytree(folders / name, whole)
    divide(whole)
    checkpoint = Checkpoint(whole)
    keys, *values, rest = checkpoint.shards()
    ordinary = (whole / "config.json").stat().st_mode
    assert {path.stat().st_mode for path in whole.iterdir()} == {ordinary}
    assert torch.equal(logits(load(whole), IDS), logits(load(folders / name), IDS))
    slice_model(checkpoint, cut_back(checkpoint.shape, 4), cut, dtype=None, links=True)
    assert all((cut / shard).samefile(whole / shard) for shard in (*values, rest))
    # What writes to one writes to all.
    assert all((cut / shard).stat().st_mode & 0o777 == 0o444 for shard in (*values, rest))
    assert (cut / keys).stat().st_mode == ordinary
    assert (cut / keys).stat().st_size < (whole / keys).stat().st_size
    model, name = load(cut), next(iter(read_tensors(cut / keys)))[0]
    learning = current_name(name, Checkpoint(cut).architecture)
    model.get_parameter(learning).data.mul_(2)
    recovered.mkdir()
    new_tensor = trained(model, {learning}, Checkpoint(cut).shape)
    rewrite(Checkpoint(cut), recovered, new_tensor, links=True)
    assert (recovered / rest).samefile(whole / rest)
    assert not (recovered / keys).samefile(cut / keys)
    assert torch.equal(logits(load(recovered), IDS), logits(model, IDS))
    stock = AutoModelForCausalLM.from_pretrained(recovered)
    assert torch.equal(logits(stock, IDS), logits(model, IDS))


def test_a_file_that_a_symlink_points_to_is_copied_and_keeps_its_mode(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("weights")
    theirs.chmod(0o644)
    (tmp_path / "imported").symlink_to(theirs)
    link(tmp_path / "imported", tmp_path / "ours")
    assert (tmp_path / "ours").read_text() == "weights"
    assert not (tmp_path / "ours").samefile(theirs)
    assert theirs.stat().st_mode & 0o777 == 0o644
