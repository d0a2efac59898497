"""Models on disk: nothing left at its random start, nothing read that could run code."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SMALL

from statecut.errors import InputError
from statecut.hub import HubItem, fetch
from statecut.models import create, load, save
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import Checkpoint, current_name
from statecut.pruning.statistics import ModelStatistics

IDS = torch.arange(20)[None]


@pytest.fixture
def folder(tmp_path):
    save(create(SMALL["gated"], seed=1), tmp_path / "model")
    return tmp_path / "model"


def logits(path):
    with torch.no_grad():
        return load(path)(IDS).logits


def rewrite(folder, change):
    """Change the tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_seed_gives_the_same_model_and_another_seed_another():
    first, again, other = (create(SMALL["shared_all"], seed=s) for s in (1, 1, 2))
    for (name, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    filters = "model.layers.0.attn.q_conv1d.weight"
    assert not torch.equal(first.get_parameter(filters), other.get_parameter(filters))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_parameter_has_a_start_of_the_right_size(name):
    """Norms at one, matrices and filters with the spread that the config names."""
    spread = SMALL[name]["initializer_range"]
    for key, parameter in create(SMALL[name], seed=1).named_parameters():
        if parameter.numel() > 100:
            assert parameter.std().item() == pytest.approx(spread, rel=0.25), key
        assert parameter.abs().max().item() < 10, key


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.layers.1.attn.A_log"), r"Missing key.*model\.layers\.1\.attn\.A_log"),
    (lambda t: t.update(more=torch.zeros(3)), r"Unexpected key.*more"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(97, 31)}),
     r"lm_head\.weight: .*\[97, 31\].*\[97, 32\]"),
])  # fmt: skip
def test_a_parameter_that_does_not_fit_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(InputError, match=message):
        load(folder)


def test_names_of_older_versions_are_understood(folder):
    expected = logits(folder)
    weights = ModelStatistics(Checkpoint(folder)).weight_magnitudes("k")

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

    rewrite(folder, older)
    assert torch.equal(logits(folder), expected)
    assert torch.equal(ModelStatistics(Checkpoint(folder)).weight_magnitudes("k"), weights)


@pytest.mark.parametrize("wrapped", [
    "module._orig_mod.{}", "_orig_mod.module.{}", "module.module.{}",
    "_orig_mod.base_model.model.module._orig_mod.{}", "module.base_model.model.{}",
])  # fmt: skip
def test_wrappers_are_taken_off_in_any_order(wrapped):
    name = "model.layers.1.attn.q_proj.weight"
    kind = ARCHITECTURES["delta_net"]
    assert current_name(wrapped.format(name), kind) == name
    assert current_name("module.model.layers.1._orig_mod.attn.q_proj.weight", kind) == name


def test_what_one_architecture_never_used_another_may():
    kind = ARCHITECTURES["gated_deltanet"]
    assert current_name("model.layers.3.attn.D", kind) is None
    assert (
        current_name("model.layers.3.attn.D", replace(kind, unused=())) == "model.layers.3.attn.D"
    )


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
    expected = logits(folder)
    hub.push("model", "owner/net", folder)
    assert fetch([HubItem("model", "owner/net")]) == {}
    assert torch.equal(logits("owner/net"), expected)
    with pytest.raises(InputError, match="model owner/other is not in"):
        load("owner/other")


def test_code_that_comes_with_a_model_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code of the model ran')")
    assert type(load(folder)).__module__.startswith("fla.")


def test_an_unknown_architecture_is_refused_with_the_nearest(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gated_delta_net"}))
    with pytest.raises(InputError, match="did you mean 'gated_deltanet'"):
        Checkpoint(folder)


def test_a_head_width_that_is_not_whole_is_refused():
    with pytest.raises(InputError, match=r"= 10\.666.*must be a whole number"):
        create({**SMALL["delta_net"], "num_heads": 3}, seed=0)
    with pytest.raises(InputError, match="must be a multiple of num_heads 2"):
        create({**SMALL["gated"], "num_v_heads": 3}, seed=0)


@pytest.fixture
def sharded(folder):
    """The same model in several files."""
    load(folder).save_pretrained(folder.parent / "shards", max_shard_size="20KB")
    return folder.parent / "shards"


def test_shards_are_read_as_one(folder, sharded):
    assert len(Checkpoint(sharded).shards()) > 1
    assert torch.equal(logits(sharded), logits(folder))


def change_index(folder, **values):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_tensor_that_only_the_index_knows_is_named(sharded):
    files = Checkpoint(sharded).files
    change_index(sharded, weight_map={**files, "more": files["lm_head.weight"]})
    with pytest.raises(InputError, match=r"says that more is in model-.*, and it is not"):
        Checkpoint(sharded)


def test_a_truncated_shard_is_named_when_the_folder_is_opened(sharded):
    shard = Checkpoint(sharded).shards()[-1]
    (sharded / shard).write_bytes((sharded / shard).read_bytes()[:-100])
    with pytest.raises(InputError, match=f"{shard} is cut off or damaged"):
        Checkpoint(sharded)


@pytest.mark.parametrize(("files", "message"), [
    ({}, "0 of 0 files"),
    ({"lm_head.weight": "../model/model.safetensors"}, r"1 of 1 files .* missing \(\.\./model"),
])  # fmt: skip
def test_an_index_that_cannot_be_one_is_refused(sharded, files, message):
    change_index(sharded, weight_map=files)
    with pytest.raises(InputError, match=message):
        Checkpoint(sharded)


def test_headers_have_shapes_and_types_and_no_numbers(sharded):
    checkpoint = Checkpoint(sharded)
    headers = dict(checkpoint.headers())
    for name, tensor in checkpoint.tensors():
        assert headers[name].is_meta
        assert (headers[name].shape, headers[name].dtype) == (tensor.shape, tensor.dtype)


def test_the_dtype_asked_for_is_the_dtype_of_all(folder):
    for dtype in (torch.bfloat16, torch.float32):
        assert {p.dtype for p in load(folder, dtype=dtype).parameters()} == {dtype}


def test_the_digest_tells_models_apart(folder):
    before = Checkpoint(folder).digest()
    assert Checkpoint(folder).digest() == before
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1e-3))
    assert Checkpoint(folder).digest() != before


@pytest.mark.parametrize(
    ("stored", "on_a_cpu"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_a_cpu_computes_no_16_bits_and_a_gpu_no_32(tmp_path, stored, on_a_cpu):
    save(create(SMALL["delta_net"], seed=0, dtype=stored), tmp_path / "model")
    model = Checkpoint(tmp_path / "model")
    assert model.compute_dtype("cpu") == on_a_cpu
    assert model.compute_dtype("cuda:1") == torch.bfloat16
