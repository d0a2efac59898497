"""A cut model is the unpruned one with the cut channels set to zero: same logits, any widths.

The reference is the unpruned model with zeros in everything that makes those channels. Where a
config has one eps for all norms, its other norms have the eps that the cut wrote; its output norms
have their own. Rules and norms of fla's models compute in float64 here, transformers' in float32.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL, WITH_EXPERTS, logits, relative, rewritten, small_model, some

from statecut.errors import InputError
from statecut.models.architectures import ARCHITECTURES
from statecut.models.capture import mixers
from statecut.models.checkpoint import Checkpoint, create, load, save
from statecut.pruning.slicing import slice_model
from statecut.recovery.training import scale_eps

IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))


def zero_dropped(model, change, channels):
    """Zeros in everything that makes the channels that are not kept."""
    kind, shape, modules = mixers(model)
    tensors = (kind.q_proj, kind.k_proj, *kind.filters, kind.v_proj, *kind.value_tensors)
    makers = [part for part in tensors if part.channels == channels]
    for index, module in enumerate(modules):
        parameters = dict(module.named_parameters())
        for part in makers:
            if part.name in parameters and not part.name.endswith("dt_bias"):
                for places in torch.from_numpy(part.places(shape)):
                    dropped = torch.ones(shape.size(channels), dtype=torch.bool)
                    dropped.scatter_(1, change.kept[index], False)
                    parameters[part.name].data.movedim(part.axis, 0)[places[dropped]] = 0


def with_low_rank(model, rank):
    """The pairs of matrices that meet in d_v channels, with a product of a lower rank."""
    kind, _, modules = mixers(model)
    for module in modules:
        for names in kind.bottlenecks:
            first, second = (module.get_parameter(name).data for name in names)
            U, S, V = torch.linalg.svd(second.double() @ first.double(), full_matrices=False)
            first[rank:], second[:, rank:] = 0, 0
            first[:rank], second[:, :rank] = V[:rank], U[:, :rank] * S[:rank]


def zeroed(folder, cut, keys, values):
    """The unpruned model in a folder with the channels that a cut model lacks set to zero."""
    kind, whole = cut.architecture, Checkpoint(folder)
    shape, eps = whole.shape, {kind.eps_key: kind.eps(cut.config)} if kind.eps_key else {}
    model = load(rewritten(folder, folder.with_name("eps"), **eps))
    for channels, change in (("key", keys), ("value", values)):
        if change:
            zero_dropped(model, change, channels)
    if values and values.width < shape.value_width:
        with_low_rank(model, values.width)
    if eps:
        scale_eps(model, kind.eps(whole.config) / kind.eps(cut.config))
    return model


@pytest.mark.parametrize("name", SMALL)
@settings(deadline=None, max_examples=4)
@given(data=st.data())
def test_a_cut_model_is_the_unpruned_one_with_zeros(tmp_path_factory, name, data):
    root = tmp_path_factory.mktemp(name)
    config, dtype = SMALL[name], torch.float64
    if name in WITH_EXPERTS:  # all at once: rounding would choose among them, in float32 alone
        config, dtype = config | {"num_experts_per_tok": 4}, torch.float32
    kind = ARCHITECTURES[config["model_type"]]
    full, value_full = (data.draw(st.integers(2, 20), label=label) for label in ("D", "V"))
    width = data.draw(st.integers(1, full), label="k")
    value_width = data.draw(st.integers(1, value_full), label="v")
    if kind.square:
        value_full, value_width = full, width
    save(small_model(kind.resized(config, full, value_full), dtype), root / "model")
    whole = Checkpoint(root / "model")
    keys = some(whole.shape, width, "key") if width < full else None
    values = some(whole.shape, value_width) if value_width < value_full else None
    slice_model(whole, keys, root / "cut", values=values, dtype=None)

    cut = Checkpoint(root / "cut")
    assert (cut.shape.width, cut.shape.value_width) == (width, value_width)
    found = load(root / "cut")
    if kind.eps_key is None:  # no config can say it: exact in memory alone
        scale_eps(found, kind.eps_factor(whole.shape, cut.shape))
    else:
        scaled = full / width if kind.call.scaled else 1
        expected = kind.default_eps * scaled * value_full / value_width
        assert kind.eps(cut.config) == pytest.approx(expected, rel=1e-12)
    exact = logits(zeroed(root / "model", cut, keys, values), IDS)
    error = relative(logits(found, IDS), exact)
    assert error < (1e-5 if kind.library == "transformers" else 1e-10)


@pytest.mark.parametrize("name", ["delta_net", "gated", "kda", "qwen3_next", "qwen3_5"])
def test_an_eps_that_is_kept_is_another_model(folders, tmp_path, name):
    whole = Checkpoint(folders / name)
    keys, values = some(whole.shape, 3, "key"), some(whole.shape, 4)
    for eps in ("kept", "matched"):
        slice_model(whole, keys, tmp_path / eps, values=values, dtype=None, eps=eps)
    kept, matched = (Checkpoint(tmp_path / eps) for eps in ("kept", "matched"))
    kind = whole.architecture
    assert kind.eps(kept.config) == kind.eps(whole.config)
    o_proj = kind.name(0, kind.o_proj)
    factor = math.sqrt(whole.shape.value_width / 4)
    torch.testing.assert_close(matched.tensor(o_proj), factor * kept.tensor(o_proj))
    assert relative(*(logits(load(tmp_path / eps), IDS) for eps in ("kept", "matched"))) > 1e-3


@pytest.mark.parametrize("name", SMALL)
def test_the_config_says_the_eps_that_the_output_norm_has(name):
    """And what it is where it says none."""
    kind = ARCHITECTURES[SMALL[name]["model_type"]]
    for key in [{}, {kind.eps_key: 3e-3}] if kind.eps_key else [{}, {"rms_norm_eps": 3e-3}]:
        model = create(SMALL[name] | key, seed=0)
        norm = model.get_submodule(kind.name(0, kind.norm_eps.rpartition(".")[0]))
        said = kind.eps(SMALL[name] | key) if kind.eps_key else 1e-5
        assert getattr(norm, kind.norm_eps.rpartition(".")[2]) == said


def test_an_eps_in_the_code_stays_and_is_told(folders, tmp_path, caplog):
    whole = Checkpoint(folders / "olmo_hybrid")
    slice_model(whole, some(whole.shape, 3, "key"), tmp_path / "cut", dtype=None)
    assert "the eps of olmo_hybrid's output norm stands in the library's code" in caplog.text
    assert Checkpoint(tmp_path / "cut").config["rms_norm_eps"] == whole.config["rms_norm_eps"]


@pytest.mark.parametrize(
    ("part", "bad"),
    [("model.layers.1.mlp.up_proj.weight", math.nan), ("lm_head.weight", math.inf)],
)
def test_weights_that_are_no_numbers_are_refused_and_nothing_is_written(tmp_path, bad, part):
    model = small_model(SMALL["delta_net"])
    with torch.no_grad():
        model.get_parameter(part)[0, 0] = bad
    save(model, tmp_path / "model")
    whole = Checkpoint(tmp_path / "model")
    with pytest.raises(InputError, match=f"{part} has NaN or infinity among its numbers"):
        slice_model(whole, some(whole.shape, 3, "key"), tmp_path / "cut")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
