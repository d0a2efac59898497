"""`statecut recover`: recovery of a pruned model of one's own, from text to a recovered model."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from statecut.arguments import command_line
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.evaluation.perplexity import held_out_sequences, pack_text
from statecut.files import check_disk_space, explain_full_disk
from statecut.hub import model_folder, model_name
from statecut.models.checkpoint import Checkpoint
from statecut.models.kernels import checked_device
from statecut.models.shapes import Shape
from statecut.preflight import check_shapes
from statecut.pruning.prune import Measured, Pruned
from statecut.pruning.refit import check_cut_from
from statecut.record import Record
from statecut.recovery.checkpoints import Output
from statecut.recovery.request import RecoveryRequest
from statecut.recovery.training import recover, recovered_facts

logger = logging.getLogger(__name__)


def run(request: RecoveryRequest) -> Pruned:
    """Recover the model in a folder with the one it was cut from.

    Killed and called again with the same arguments, it goes on from its last checkpoint.
    """
    device, out, settings = checked_device(request.device), Path(request.out), request.settings
    student, teacher = (Checkpoint(model_folder(m)) for m in (request.model, request.teacher))
    check_cut_from(student, teacher)
    check_disk_space(out, sum((student.folder / f).stat().st_size for f in student.shards()))
    # Before the text is packed: it may be that the model cannot be trained here.
    padded_to = trainable_width(student) if device == "cuda" else None
    sequences = math.ceil(settings.sequences / settings.epochs)
    slices = {"recovery": sequences, "held_out": held_out_sequences(sequences)}
    text, checkpoints = Path(str(request.text)), request.checkpoints
    with TemporaryDirectory() as folder:
        packed = Path(folder) / "text"
        sizes = {"length": request.length, "seed": settings.seed}
        with explain_full_disk(gettempdir()):
            pack_text(text, student, packed, slices=slices, **sizes)
        data = PackedTokens(packed, slice_name="recovery")
        recovery = recovered_facts(settings, request.length, student, teacher)
        recovery["text"] = data.manifest.source.revision
        record = Record.read(student.folder).then(
            base={"name": model_name(student.folder), "digest": student.digest()},
            recovery=recovery,
            command=command_line("recover", request),
        )
        measured = Measured(packed, device, batch=8)
        measured.add("unpruned", teacher)
        measured.add("pruned", student)

        def files(folder: Path) -> dict[str, str]:
            nonlocal record
            measured.add("recovered", Checkpoint(folder))
            record = record.also(measured=measured.entry())
            return record.files(out.name, student.config)

        logger.info("recovery: checkpoints every ten minutes, in %s", checkpoints)
        output = Output(out, checkpoints=checkpoints, files=files, force=request.force)
        folders = (student.folder, teacher.folder)
        recover(*folders, data, settings, output, device=device, padded_to=padded_to)
        if not any(checkpoints.iterdir()):  # others may come from other settings
            checkpoints.rmdir()
    return Pruned(out, record)


def trainable_width(student: Checkpoint) -> int | None:
    """What its keys are padded to for training on this GPU, None for their own width."""
    shape, kind = student.shape, student.architecture
    if kind.rule is None:
        raise InputError(f"{student.folder}: Statecut trains no {kind.model_type} on a GPU")
    kernel = Shape(kind.rule.name, shape.heads, shape.width, shape.value_heads, shape.value_width)
    logger.info("preflight: whether this GPU trains %s", kernel.name)
    (verdict,) = check_shapes([kernel])
    if not verdict.trainable:
        raise InputError(f"{kernel.name} cannot be trained on this GPU: {verdict.reason}")
    if verdict.padded_to and kind.square:
        raise InputError(
            f"{kernel.name} cannot be trained on this GPU ({verdict.reason}), and keys of a "
            f"{kind.model_type} cannot be padded: cut to {verdict.padded_to} channels"
        )
    return verdict.padded_to
