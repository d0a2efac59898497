"""Small runs of training, as whole processes can make them too."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from small_models import SMALL

from reproduction.config.training import Recipe
from reproduction.pretraining.pretrain import pretrain
from statecut.data.packing import PackedTokens
from statecut.files import sha256, write_json
from statecut.models.checkpoint import Checkpoint, create, save
from statecut.pruning.slicing import cut_back, slice_model
from statecut.recovery.checkpoints import Finished, Output
from statecut.recovery.settings import Lora, Recovery

LENGTH = 24

SETTINGS = {
    "data": "text/training", "steps": 24, "batch": 2, "learning_rate": 1e-2, "warmup": 3,
    "floor": 0.1, "eps": 1e-15, "clip": 1.0, "seed": 0,
}  # fmt: skip


def recipe(**changes):
    return Recipe.model_validate({"trainer": "builtin", **SETTINGS, **changes})


def recovery(**changes):
    return Recovery(**{"lora": Lora(3, 6.0), **SETTINGS, **changes})


def packed(
    folder: Path,
    sequences: int = 48,
    vocabulary: int = 97,
    slices: dict[str, tuple[int, int]] | None = None,
) -> PackedTokens:
    """Text that can be learned: each token is followed by one of two others."""
    random = np.random.default_rng(0)
    rows = np.zeros((sequences, LENGTH), "<u2")
    for i in range(1, LENGTH):
        rows[:, i] = (3 * rows[:, i - 1] + random.integers(1, 3, sequences)) % 97
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(rows.tobytes())
        source = {"name": "chain", "revision": "0"}
        write_json(folder / "manifest.json", {
            "sha256": sha256(folder / "tokens.bin"), "dtype": "uint16", "tokens": rows.size,
            "sequence_length": LENGTH, "sequences": sequences,
            "slices": slices or {"training": [0, sequences]},
            "vocabulary_size": vocabulary, "tokenizer": "none", "tokenizer_digest": "0",
            "boundary": "eos", "source": source, "seed": 0, "statecut": "0",
        })  # fmt: skip
    return PackedTokens(folder)


def making(root: Path) -> None:
    """Tokens, a teacher and its student with half the key channels."""
    packed(root / "tokens")
    save(create(SMALL["delta_net"], seed=1), root / "teacher")
    teacher = Checkpoint(root / "teacher")
    slice_model(teacher, cut_back(teacher.shape, 8), root / "student", dtype=None)


def output_of(root: Path, out: str, save_seconds: float, wait: bool) -> Output:
    running = root / "running" / out
    return Output(root / out, checkpoints=running, save_seconds=save_seconds, force=True, wait=wait)


def pretraining(root: Path, out: str, save_seconds: float = 600, wait: bool = False) -> None:
    """What a process does that pretrains: started again, it goes on."""
    model = create(SMALL["delta_net"], seed=1)
    output = output_of(root, out, save_seconds, wait)
    pretrain(model, packed(root / "tokens"), recipe(), output)


def recovering(root: Path, out: str, save_seconds: float = 600, wait: bool = False) -> None:
    """Likewise for recovery, of the model in `student`, taught by the one in `teacher`."""
    from statecut.recovery.training import recover

    output = output_of(root, out, save_seconds, wait)
    recover(root / "student", root / "teacher", packed(root / "tokens"), recovery(), output)


def waiting(work: str, root: Path, out: str) -> None:
    """Likewise for either, as the workflow's jobs do, of which there may be two by mistake."""
    with suppress(Finished):
        {"pretraining": pretraining, "recovering": recovering}[work](root, out, wait=True)
        (root / out / "trained-by").write_text(str(os.getpid()))


FLAMED = {**SMALL["shared_head"], "vocab_size": 257}  # as many as the tokenizer has


def flaming(root: Path, out: str, gpus: int, save_seconds: float = 600) -> None:
    """What a process does that pretrains with a fake flame, on pretended GPUs."""
    from reproduction.new_tokenizers import train_tokenizer
    from reproduction.pretraining import flame

    fake = str(Path(__file__).parent / "fake_flame")
    sys.path.insert(0, fake)
    os.environ["PYTHONPATH"] = fake
    if not (root / "tokenizer").exists():
        train_tokenizer(["a few words"] * 9, root / "tokenizer", vocabulary_size=257)
    output = Output(
        root / out, checkpoints=root / "running" / out, tokenizer=root / "tokenizer",
        save_seconds=save_seconds, files=lambda _: {"README.md": "a card"},
    )  # fmt: skip
    flame.pretrain_with_flame(FLAMED, root / "tokens", flame_recipe(), output, gpus=gpus)


def flame_recipe(**changes):
    return recipe(**{"trainer": "flame", "world_size": 2, "epochs": 3, **changes})
