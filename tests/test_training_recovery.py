"""Recovery: what learns, what it learns, and that an ordinary model comes of it."""

import re

import pytest
import torch
from small_models import SMALL
from training_runs import packed, recovery

from statecut.errors import InputError
from statecut.models.architectures import architecture
from statecut.models.checkpoint import Checkpoint, create, load, save
from statecut.pruning.slicing import Keep, cut_back, slice_model
from statecut.recovery import training
from statecut.recovery.checkpoints import CURVE, Output
from statecut.recovery.settings import Lora
from statecut.recovery.training import recovery_loss, with_adapters

KINDS = ["delta_net", "delta_net_tied", "shared_head", "shared_all", "gated", "gated_value_heads"]
UNLIKE = ["delta_net_tied", "shared_head", "gated_value_heads"]


@pytest.fixture(autouse=True)
def notices(caplog):
    caplog.set_level("INFO")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Teachers, and students with half their key channels."""
    root = tmp_path_factory.mktemp("recovery")
    packed(root / "tokens")
    for kind in KINDS:
        save(create({**SMALL[kind], "initializer_range": 0.1}, seed=1), root / kind)
        teacher = Checkpoint(root / kind)
        kept = cut_back(teacher.shape, teacher.shape.width // 2).kept
        slice_model(teacher, Keep(kept.flip(-1) * 2), root / f"{kind}_half", dtype=None)
    return root


@pytest.fixture
def recover(root, tmp_path):
    """Recovers a student as a folder in tmp_path."""

    def recover(student="delta_net_half", out="out", teacher=None, padded_to=None, **settings):
        output = Output(tmp_path / out, tmp_path / "run", save_seconds=settings.pop("save", 600))
        teacher = teacher or root / str(student).removesuffix("_half")
        given = (root / student, teacher, packed(root / "tokens"), recovery(**settings), output)
        training.recover(*given, padded_to=padded_to)
        return Checkpoint(tmp_path / out)

    return recover


def loss_of(folder, teacher, ids):
    model = with_adapters(load(folder), recovery())
    with torch.no_grad():
        return recovery_loss(model, load(teacher), ids, recovery()).total


def assert_same(model, other, start):
    """But for a thousandth of what was learned."""
    for name in other.files:
        learned = (other.tensor(name) - start.tensor(name)).norm()
        assert (model.tensor(name) - other.tensor(name)).norm() <= 1e-3 * learned, name


@pytest.mark.parametrize("name", ["olmo_hybrid", "kimi_linear"])
def test_layers_with_softmax_attention_do_not_learn(name):
    """Though they have projections of the same names."""
    model = create(SMALL[name], seed=0)
    config = model.config.to_dict()
    names = [n for n, p in with_adapters(model, recovery()).named_parameters() if p.requires_grad]
    learning = {int(re.search(r"\.layers\.(\d+)\.", name)[1]) for name in names}
    assert learning == {*architecture(config).shape(config).layers}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_filters_learn_and_nothing_else(root, kind):
    """And merging the adapters changes nothing."""
    model = with_adapters(load(root / f"{kind}_half"), recovery())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    layer = r"base_model\.model\.model\.layers\.[01]\.attn\."
    adapters = layer + r"[qkv]_proj\.lora_[AB]\.default\.weight"
    filters = layer + r"[qkv]_conv1d\.weight"
    assert sum(bool(re.fullmatch(adapters, name)) for name in names) == 2 * 3 * 2
    assert sum(bool(re.fullmatch(filters, name)) for name in names) == 2 * 3
    assert len(names) == 2 * 3 * 3
    generator = torch.Generator().manual_seed(2)
    for name in names:
        parameter = model.get_parameter(name)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(0, 97, (2, 90), generator=generator)
    with torch.no_grad():
        unmerged, plain = model(ids).logits, model(ids, labels=ids).loss
        ours = recovery_loss(model, load(root / kind), ids, recovery()).ce
        merged = model.merge_and_unload()(ids).logits
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, plain)  # the cross-entropy is the library's own


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_recovered_model_is_an_ordinary_one_and_closer_to_its_teacher(
    root, recover, tmp_path, caplog, kind
):
    before, after = Checkpoint(root / f"{kind}_half"), recover(f"{kind}_half")
    assert set(after.files) == set(before.files)
    assert after.shape == before.shape
    assert re.search(r"recovery: [\d,]+ of [\d,]+ ", caplog.text)
    for name in before.files:
        learns = re.search(r"[qkv]_(proj|conv1d)", name) is not None
        assert torch.equal(after.tensor(name), before.tensor(name)) != learns, name
    ids = torch.from_numpy(packed(root / "tokens")[:])
    assert loss_of(after.folder, root / kind, ids) < loss_of(before.folder, root / kind, ids)
    assert (after.folder / CURVE).read_text().count("\n") == 25


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_padded_recovery_is_the_narrow_one(root, recover, kind):
    start = Checkpoint(root / f"{kind}_half")
    narrow, padded = (
        recover(start.folder.name, str(width), padded_to=width, steps=8)
        for width in (None, start.shape.width + 3)
    )
    assert padded.config == narrow.config
    eps = start.architecture.eps  # matched by the cut, and by padding in memory alone
    assert eps(padded.config) == eps(start.config)
    assert_same(padded, narrow, start)


def test_a_run_out_of_memory_says_what_to_change_and_goes_on_with_it(
    root, recover, monkeypatch, caplog
):
    left = 5

    def loss(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. See\nmore")
        return recovery_loss(*arguments)

    def run(pieces):
        settings = {"steps": 6, "warmup": 1, "batch": 6, "gradient_accumulation_steps": pieces}
        return recover(out=str(pieces), save=0, **settings)

    monkeypatch.setattr(training, "recovery_loss", loss)
    for pieces, message in ((1, "is 1: try 2,"), (3, "is 3: try 6,"), (6, "one sequence each")):
        with pytest.raises(InputError, match=f"^recovery: CUDA out of memory. Tried .*{message}"):
            run(pieces)
    monkeypatch.undo()
    divided = run(2)
    assert "recovery: resumes from step 5" in caplog.text
    assert_same(divided, run(1), Checkpoint(root / "delta_net_half"))


@pytest.mark.parametrize("name", ["delta_net_gate", "gated"])
def test_norms_and_biases_learn_where_they_are_to_and_padded_alike(recover, tmp_path, name):
    new = create({**SMALL[name], "conv_bias": True, "initializer_range": 0.1}, seed=1)
    for key, parameter in new.named_parameters():
        if key.endswith("bias"):  # far from zero, where they start
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    save(new, tmp_path / "teacher")
    teacher = Checkpoint(tmp_path / "teacher")
    half = cut_back(teacher.shape, teacher.shape.width // 2)
    slice_model(teacher, half, tmp_path / "student", dtype=None)
    after, padded = (
        recover(tmp_path / "student", str(width), teacher.folder, padded_to=width, steps=8,
                norms_and_biases=True)
        for width in (None, half.width + 3)
    )  # fmt: skip
    before = Checkpoint(tmp_path / "student")
    assert set(after.files) == set(before.files) == set(padded.files)
    learned = {n for n in after.files if not torch.equal(after.tensor(n), before.tensor(n))}
    assert learned == {n for n in after.files if re.search(r"[qkv]_(proj|conv1d)|norm|bias", n)}
    assert_same(padded, after, before)


@pytest.mark.parametrize("padded_to", [None, 11])
def test_a_student_with_fewer_values_in_16_bits_is_recovered(root, recover, tmp_path, padded_to):
    teacher = Checkpoint(root / "gated")
    keys, values = cut_back(teacher.shape, 8), cut_back(teacher.shape, 10, "value")
    slice_model(teacher, keys, tmp_path / "student", values=values, dtype=torch.bfloat16)
    before = Checkpoint(tmp_path / "student")
    after = recover(before.folder, teacher=teacher.folder, padded_to=padded_to, steps=20)
    assert after.shape == before.shape
    assert after.config["dtype"] == "bfloat16"
    assert {tensor.dtype for _, tensor in after.tensors()} == {torch.bfloat16}
    ids = torch.from_numpy(packed(root / "tokens")[:])
    assert loss_of(after.folder, root / "gated", ids) < loss_of(before.folder, root / "gated", ids)


def test_a_target_that_matches_nothing_is_refused_before_any_work(recover, tmp_path):
    with pytest.raises(InputError, match="'k_projection'; did you mean 'k_proj'"):
        recover(lora=Lora(3, 6.0, ("q_proj", "k_projection")))
    assert list(tmp_path.iterdir()) == []
