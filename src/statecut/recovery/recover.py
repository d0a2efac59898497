"""`statecut recover`: recovery of a pruned model of one's own, from text to a recovered model."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from statecut.arguments import check_counts, check_length, check_seed
from statecut.card import card
from statecut.data.packing import PackedTokens
from statecut.data.sources import text_files
from statecut.errors import InputError
from statecut.evaluation.perplexity import held_out_sequences, measure
from statecut.files import atomic_write, check_disk_space, check_writable, explain_full_disk
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import Shape
from statecut.preflight import check_shapes
from statecut.pruning.prune import check_out, pack_text
from statecut.pruning.refit import check_cut_from
from statecut.recovery.checkpoints import Output
from statecut.recovery.settings import Recovery
from statecut.recovery.training import recover, recovered_facts
from statecut.serving.engines import computed_wrong

logger = logging.getLogger(__name__)


def recover_folder(
    model: Path,
    teacher: Path,
    out: Path,
    *,
    text: Path | None,
    length: int,
    settings: Recovery,
    device: str,
    force: bool,
) -> list[str]:
    """Recover the model in a folder with the one it was cut from. What changed, in lines.

    Killed and called again with the same arguments, it goes on from its last checkpoint.
    """
    accumulation = settings.gradient_accumulation_steps
    check_counts(steps=settings.steps, batch=settings.batch, epochs=settings.epochs)
    check_counts(gradient_accumulation_steps=accumulation)
    if settings.batch % accumulation:
        raise InputError(
            f"--gradient-accumulation-steps {accumulation}: must divide --batch {settings.batch}"
        )
    if not 0 < settings.learning_rate < math.inf:
        raise InputError(f"--learning-rate {settings.learning_rate}: must be a number above 0")
    check_length(length)
    check_seed(settings.seed)
    if text is not None:
        text_files(text)
    check_out(out, [model, teacher], text, force=force)
    checkpoints = check_writable(out.with_name(f"{out.name}.checkpoints"), folder=True)
    student, wider = Checkpoint(model), Checkpoint(teacher)
    student.check_no_softmax()
    student.check_text_only()
    check_cut_from(student, wider)
    check_disk_space(out, sum((model / shard).stat().st_size for shard in student.shards()))
    # Before the text is packed: it may be that the model cannot be trained here.
    padded_to = trainable_width(student) if device == "cuda" else None
    sequences = math.ceil(settings.sequences / settings.epochs)
    slices = {"recovery": sequences, "held_out": held_out_sequences(sequences)}
    with TemporaryDirectory() as folder:
        packed = Path(folder) / "text"
        with explain_full_disk(gettempdir()):
            pack_text(text, student, packed, slices=slices, length=length, seed=settings.seed)
        data = PackedTokens(packed, slice_name="recovery")
        source = data.manifest.source
        facts = {
            **recovered_facts(settings, length, student, wider),
            "text of the recovery": f"{source.name} ({source.revision})",
        }
        write_card = partial(
            card,
            out.name,
            f"{model.name}, recovered by Statecut.",
            command=f"statecut recover {model.name} {teacher.name} {out.name} "
            f"--steps {settings.steps} --batch {settings.batch} --length {length} "
            f"--epochs {settings.epochs} --learning-rate {settings.learning_rate} "
            f"--seed {settings.seed}" + (f" --text {text.name}" if text else ""),
            config=student.config,
            base=model.name,
        )
        logger.info("recovery: checkpoints every ten minutes, in %s", checkpoints)
        output = Output(out, checkpoints=checkpoints, card=write_card(facts), force=force)
        recover(model, teacher, data, settings, output, device=device, padded_to=padded_to)
        if not any(checkpoints.iterdir()):  # others may come from other settings
            checkpoints.rmdir()
        models = {"teacher": wider, "pruned": student, "recovered": Checkpoint(out)}
        held_out = measure(models, packed, device=device)
    with atomic_write(out / "README.md", force=True) as aside:
        aside.write_text(write_card({**facts, "perplexity after recovery": held_out.fact()}))
    tokens = settings.sequences * length
    lines = [held_out.line(), f"recovery             {settings.steps:,} steps, {tokens:,} tokens"]
    if "engine" not in facts:
        kind = student.architecture.model_type
        by_ratio = student.shape.value_width == wider.shape.value_width
        lines += computed_wrong(kind, student.shape, wider.shape, by_ratio=by_ratio)
    return lines


def trainable_width(student: Checkpoint) -> int | None:
    """What its keys are padded to for training on this GPU, None for their own width."""
    shape, kind = student.shape, student.architecture
    if kind.rule is None:
        raise InputError(f"{student.folder}: Statecut trains no {kind.model_type} on a GPU")
    kernel = Shape(
        kind.rule.name, kind.call.heads(shape), shape.width, shape.value_heads, shape.value_width
    )
    logger.info("preflight: whether this GPU trains %s", kernel.name)
    (verdict,) = check_shapes([kernel])
    if not verdict.trainable:
        raise InputError(f"{kernel.name} cannot be trained on this GPU: {verdict.reason}")
    return verdict.padded_to
