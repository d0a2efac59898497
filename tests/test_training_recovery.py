"""Recovery: what learns, what it learns, and that an ordinary model comes of it."""

import re

import pytest
import torch
from small_models import SMALL
from training_runs import making, packed, recovery

from statecut.errors import InputError
from statecut.models import create, load, save
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.slicing import Keep, cut_back, slice_model
from statecut.recovery import training
from statecut.recovery.checkpoints import CURVE, Checkpoints, Output
from statecut.recovery.settings import Lora
from statecut.recovery.training import recover, recovery_loss, with_adapters

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
        half = teacher.shape.width // 2
        kept = cut_back(teacher.shape, half).kept
        slice_model(teacher, Keep(kept.flip(-1) * 2), root / f"{kind}_half", dtype=None)
    return root


@pytest.fixture(scope="module")
def data(root):
    return packed(root / "tokens")


def loss_of(student, teacher, ids):
    with torch.no_grad():
        return recovery_loss(with_adapters(student, recovery()), teacher, ids, recovery())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_filters_learn_and_nothing_else(root, kind):
    model = with_adapters(load(root / f"{kind}_half"), recovery())
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    layer = r"base_model\.model\.model\.layers\.[01]\.attn\."
    adapters = layer + r"[qkv]_proj\.lora_[AB]\.default\.weight"
    filters = layer + r"[qkv]_conv1d\.weight"
    assert sum(bool(re.fullmatch(adapters, name)) for name in names) == 2 * 3 * 2
    assert sum(bool(re.fullmatch(filters, name)) for name in names) == 2 * 3
    assert len(names) == 2 * 3 * 3


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_recovered_model_is_an_ordinary_one_and_closer_to_its_teacher(
    root, data, tmp_path, caplog, kind
):
    student, out = root / f"{kind}_half", tmp_path / "out"
    recover(student, root / kind, data, recovery(), Output(out, tmp_path / "run"))
    before, after = Checkpoint(student), Checkpoint(out)
    assert set(after.files) == set(before.files)
    assert after.shape == before.shape
    learned = with_adapters(load(student), recovery()).named_parameters()
    sizes = {name: p.numel() for name, p in learned if p.requires_grad}
    assert f"recovery: {sum(sizes.values()):,} of " in caplog.text
    frozen = [n for n in before.files if not re.search(r"[qkv]_(proj|conv1d)", n)]
    for name in frozen:
        assert torch.equal(after.tensor(name), before.tensor(name)), name
    for name in set(before.files) - set(frozen):
        assert not torch.equal(after.tensor(name), before.tensor(name)), name
    ids, teacher = torch.from_numpy(data[:]), load(root / kind)
    lost, regained = loss_of(load(student), teacher, ids), loss_of(load(out), teacher, ids)
    assert regained.total < lost.total
    assert (out / CURVE).read_text().count("\n") == 25


@pytest.mark.parametrize("kind", KINDS)
def test_merging_changes_nothing(root, kind):
    adapted = with_adapters(load(root / f"{kind}_half"), recovery())
    generator = torch.Generator().manual_seed(2)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(0, 97, (2, 90), generator=generator)
    with torch.no_grad():
        unmerged = adapted(ids).logits
        plain = adapted(ids, labels=ids).loss
        ours = recovery_loss(adapted, load(root / kind), ids, recovery()).ce
        merged = adapted.merge_and_unload()(ids).logits
    torch.testing.assert_close(merged, unmerged, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, plain)  # the cross-entropy is the library's own


def test_the_unpruned_model_is_a_student_too(root, data, tmp_path):
    """It has nothing to learn of itself: the divergence begins at zero."""
    model = root / "delta_net"
    recover(model, model, data, recovery(), Output(tmp_path / "out", tmp_path / "run"))
    rows = (tmp_path / "out" / CURVE).read_text().splitlines()
    assert float(rows[1].split(",")[4]) == pytest.approx(0, abs=1e-5)
    assert Checkpoint(tmp_path / "out").shape == Checkpoint(model).shape


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_padded_recovery_is_the_narrow_one(root, data, tmp_path, kind):
    folders = []
    width = Checkpoint(root / f"{kind}_half").shape.width
    for padded_to in (None, width + 3):
        folders.append(tmp_path / str(padded_to))
        recover(
            root / f"{kind}_half", root / kind, data, recovery(steps=8),
            Output(folders[-1], tmp_path / "run"), padded_to=padded_to,
        )  # fmt: skip
    narrow, padded = (Checkpoint(folder) for folder in folders)
    assert padded.config == narrow.config
    start = Checkpoint(root / f"{kind}_half")
    eps = start.architecture.eps  # matched by the cut, and by padding in memory alone
    assert eps(padded.config) == eps(start.config)
    for name in narrow.files:
        learned = (narrow.tensor(name) - start.tensor(name)).norm()
        assert (padded.tensor(name) - narrow.tensor(name)).norm() <= 1e-3 * learned, name


def test_a_divided_batch_is_the_same_batch(root, data, tmp_path):
    recovered = []
    for pieces in (1, 2, 4):
        out = tmp_path / str(pieces)
        settings = recovery(steps=4, warmup=1, batch=4, gradient_accumulation_steps=pieces)
        student, teacher = root / "delta_net_half", root / "delta_net"
        recover(student, teacher, data, settings, Output(out, tmp_path / "run"))
        recovered.append(Checkpoint(out))
    at_once, *divided = recovered
    for name in at_once.files:
        learned = (at_once.tensor(name) - Checkpoint(student).tensor(name)).norm()
        for model in divided:
            assert (model.tensor(name) - at_once.tensor(name)).norm() <= 1e-3 * learned, name


FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of "
    "which 1.0 GiB is free. Including non-PyTorch memory, this process has 78.0 GiB in use. See\n"
    "the documentation"
)


def fills_up(calls):
    """The loss, until it has been asked so often."""

    def loss(*arguments):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise torch.OutOfMemoryError(FULL)
        return recovery_loss(*arguments)

    return loss


def test_a_run_out_of_memory_says_what_to_change_and_goes_on_with_it(
    root, data, tmp_path, monkeypatch, caplog
):
    def run(pieces):
        recover(
            root / "delta_net_half", root / "delta_net", data,
            recovery(steps=6, warmup=1, batch=6, gradient_accumulation_steps=pieces),
            Output(tmp_path / f"{pieces}", tmp_path / "run", save_seconds=0),
        )  # fmt: skip

    monkeypatch.setattr(training, "recovery_loss", fills_up(5))
    with pytest.raises(InputError) as ended:
        run(1)
    (line,) = str(ended.value).splitlines()
    assert line.startswith("recovery: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert "is free; `gradient_accumulation_steps` is 1: try 2," in line
    monkeypatch.setattr(training, "recovery_loss", fills_up(1))
    with pytest.raises(InputError, match=r"`gradient_accumulation_steps` is 3: try 6,"):
        run(3)
    with pytest.raises(InputError, match="is 6, one sequence each: use a GPU with more memory"):
        run(6)
    monkeypatch.undo()
    caplog.clear()
    run(2)
    assert "recovery: resumes from step 5" in caplog.text
    run(1)
    whole, started = Checkpoint(tmp_path / "1"), Checkpoint(root / "delta_net_half")
    for name in whole.files:
        learned = (whole.tensor(name) - started.tensor(name)).norm()
        apart = (Checkpoint(tmp_path / "2").tensor(name) - whole.tensor(name)).norm()
        assert apart <= 1e-3 * learned, name


def test_another_error_is_not_taken_for_a_lack_of_memory(root, data, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(training, "recovery_loss", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        recover(
            root / "delta_net_half", root / "delta_net", data, recovery(),
            Output(tmp_path / "out", tmp_path / "run"),
        )  # fmt: skip


@pytest.mark.parametrize("model", [
    {**SMALL["delta_net_gate"], "conv_bias": True},
    {**SMALL["gated"], "conv_bias": True},
])  # fmt: skip
def test_norms_and_biases_learn_where_they_are_to_and_padded_alike(data, tmp_path, caplog, model):
    new = create({**model, "initializer_range": 0.1}, seed=1)
    for name, parameter in new.named_parameters():
        if name.endswith("bias"):  # far from zero, where they start
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    save(new, tmp_path / "teacher")
    teacher = Checkpoint(tmp_path / "teacher")
    half = cut_back(teacher.shape, teacher.shape.width // 2)
    slice_model(teacher, half, tmp_path / "student", dtype=None)
    for padded_to in (None, half.width + 3):
        recover(
            tmp_path / "student", teacher.folder, data,
            recovery(steps=8, norms_and_biases=True),
            Output(tmp_path / str(padded_to), tmp_path / "run"), padded_to=padded_to,
        )  # fmt: skip
    before, after = Checkpoint(tmp_path / "student"), Checkpoint(tmp_path / "None")
    padded = Checkpoint(tmp_path / str(half.width + 3))
    assert set(after.files) == set(before.files) == set(padded.files)
    learned = {n for n in after.files if not torch.equal(after.tensor(n), before.tensor(n))}
    assert learned == {n for n in after.files if re.search(r"[qkv]_(proj|conv1d)|norm|bias", n)}
    for name in learned:
        change = (after.tensor(name) - before.tensor(name)).norm()
        assert (padded.tensor(name) - after.tensor(name)).norm() <= 1e-3 * change, name


@pytest.mark.parametrize("padded_to", [None, 11])
def test_a_student_with_fewer_values_is_recovered(root, data, tmp_path, padded_to):
    teacher = Checkpoint(root / "gated")
    keys, values = cut_back(teacher.shape, 8), cut_back(teacher.shape, 10, "value")
    slice_model(teacher, keys, tmp_path / "student", values=values, dtype=None)
    recover(
        tmp_path / "student", root / "gated", data, recovery(steps=20),
        Output(tmp_path / "out", tmp_path / "run"), padded_to=padded_to,
    )  # fmt: skip
    assert Checkpoint(tmp_path / "out").shape == Checkpoint(tmp_path / "student").shape
    ids, whole = torch.from_numpy(data[:]), load(root / "gated")
    before, after = (loss_of(load(tmp_path / n), whole, ids).total for n in ("student", "out"))
    assert after < before


def test_a_student_keeps_its_type(root, data, tmp_path):
    teacher = Checkpoint(root / "delta_net")
    slice_model(teacher, cut_back(teacher.shape, 8), tmp_path / "student", dtype=torch.bfloat16)
    recover(
        tmp_path / "student", root / "delta_net", data, recovery(steps=4),
        Output(tmp_path / "out", tmp_path / "run"),
    )  # fmt: skip
    out = Checkpoint(tmp_path / "out")
    assert out.config["dtype"] == "bfloat16"
    assert {tensor.dtype for _, tensor in out.tensors()} == {torch.bfloat16}


def test_adapters_start_alike_whatever_the_width(root):
    def factors(folder):
        model = with_adapters(load(root / folder), recovery(seed=5))
        return [p for name, p in model.named_parameters() if ".lora_A." in name]

    for full, half in zip(factors("delta_net"), factors("delta_net_half"), strict=True):
        assert torch.equal(full, half)


def test_a_target_that_matches_nothing_is_refused_before_any_work(root, data, tmp_path):
    settings = recovery(lora=Lora(3, 6.0, ("q_proj", "k_projection")))
    with pytest.raises(InputError, match="'k_projection'; did you mean 'k_proj'"):
        recover(
            root / "delta_net_half", root / "delta_net", data, settings,
            Output(tmp_path / "out", tmp_path / "run"),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_raised_version_begins_anew(tmp_path, monkeypatch):
    making(tmp_path)
    folders = []

    class Noted(Checkpoints):
        def __init__(self, root, run):
            super().__init__(root, run)
            folders.append(self.folder)
            raise InterruptedError

    monkeypatch.setattr("statecut.recovery.checkpoints.Checkpoints", Noted)
    for version in (1, 1, 2):
        with pytest.raises(InterruptedError):
            recover(
                tmp_path / "student", tmp_path / "teacher", packed(tmp_path / "tokens"),
                recovery(), Output(tmp_path / "out", tmp_path / "run", version=version),
            )  # fmt: skip
    assert folders[0] == folders[1] != folders[2]
