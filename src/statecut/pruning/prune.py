"""The whole method on one model: calibrate, select, slice, refit, and report what changed."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import torch

from statecut.arguments import width as width_of
from statecut.data.documentation import documentation, documentation_source
from statecut.data.packing import PackedTokens, pack
from statecut.data.sources import describe, read
from statecut.data.tokenizer import check_vocabulary, load_tokenizer
from statecut.errors import InputError
from statecut.evaluation.perplexity import held_out_sequences, measure
from statecut.files import (
    atomic_write,
    check_disk_space,
    check_not_overwriting,
    check_output_path,
    existing_parent,
    explain_full_disk,
)
from statecut.models.checkpoint import Checkpoint, check_parameters
from statecut.models.shapes import Channels, MixerShape
from statecut.pruning.budget import STEPS, check_cut, in_words, wanted_cuts
from statecut.pruning.calibration import Calibration, calibrate_folder
from statecut.pruning.methods import METHODS
from statecut.pruning.outcome import Candidate, Outcome, best
from statecut.pruning.refit import check_refit, refit, write_refitted
from statecut.pruning.request import Request
from statecut.pruning.select import select
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import check_sliceable, slice_model, sliced_sizes
from statecut.pruning.statistics import ModelStatistics

logger = logging.getLogger(__name__)

__all__ = ["Request", "prune"]


def prune(request: Request) -> list[str]:
    """Write the pruned model to `request.out`. What changed, in lines."""
    method = request.check()
    checkpoint = Checkpoint(request.model)
    shapes = wanted_shapes(request, checkpoint)
    cuts_values = any(shape.value_width < checkpoint.shape.value_width for shape in shapes)
    dtype = written_dtype(request, checkpoint)
    # A method that needs no text is not calibrated for the refit's sake.
    calibrates = "text" in method.needs or (request.text is not None and not request.refits)
    if calibrates:
        checkpoint.check_no_softmax()
    check_model(request, checkpoint, shapes, dtype)
    if calibrates or request.refits:
        check_parameters(checkpoint)
    with TemporaryDirectory() as folder:
        packed, calibration = Path(folder) / "text", None
        if calibrates or request.refits:
            slices = {"calibration": request.sequences}
            if request.refits:
                slices["held_out"] = held_out_sequences(request.sequences)
            length, seed = request.length, request.seed
            with explain_full_disk(gettempdir()):
                pack_text(request.text, checkpoint, packed, slices=slices, length=length, seed=seed)
            data = PackedTokens(packed, slice_name="calibration")
            if request.refits:
                check_refit(checkpoint, len(data), length, torch.from_numpy(data[:]))
            if calibrates:
                calibration = calibrate_on(data, request, values=cuts_values)
        selections = choose(request, ModelStatistics(checkpoint, calibration), shapes)
        if request.state is None:
            logger.info("slicing: writing %s", request.out)
        if dtype and not request.dtype:
            logger.info(
                "written as bfloat16: DeltaNet's kernel refuses float32 (--dtype float32 keeps it)"
            )
        with explain_full_disk(request.out):
            if request.refits:
                outcome = slice_and_refit(request, checkpoint, selections, dtype, packed)
            else:
                (selection,) = selections.values()
                outcome = Outcome(request, checkpoint, selection)
                options = {**selection.changes(), "dtype": dtype, "eps": request.eps}
                card, force = outcome.card(), request.force
                slice_model(checkpoint, out=request.out, **options, card=card, force=force)
    return outcome.lines()


def check_model(
    request: Request,
    checkpoint: Checkpoint,
    shapes: Sequence[MixerShape],
    dtype: torch.dtype | None,
) -> None:
    """An error if the model cannot be cut to these widths, refitted, or written."""
    full = checkpoint.shape
    check_sliceable(checkpoint, values=any(s.value_width < full.value_width for s in shapes))
    if full in shapes:
        raise InputError(
            f"--round-to {request.round_to} leaves all {full.width} channels of a head at ratio "
            f"{request.ratio}: round to less, or cut more"
        )
    if request.target is not None and all(shape.width == full.width for shape in shapes):
        raise InputError(
            f"--target {request.target}: it says what key channels are judged by, and "
            f"{request.wanted} cuts values alone; leave it out"
        )
    if request.refits:
        check_refit(checkpoint, request.sequences, request.length)
    check_out(request.out, [request.model], request.text, force=request.force)
    # The refit reads the sliced model from files, too; of several the best until then is kept.
    copies = (2 if len(shapes) == 1 else 3) if request.refits else 1
    size = max(sliced_sizes(checkpoint, shape, dtype)[1] for shape in shapes)
    check_disk_space(request.out, copies * size)


def check_out(out: Path, models: list[Path], text: Path | None, *, force: bool) -> None:
    """An error if a model made from others, and from a text, may not be written there."""
    sources = models if text is None else [*models, text]
    check_not_overwriting(out, sources, kind="model", mark="config.json")
    check_output_path(out, force=force, folder=True)
    if any(model.resolve() in out.resolve().parents for model in models):
        raise InputError(f"{out}: lies in the model's own folder; give one outside of it")


def wanted_shapes(request: Request, checkpoint: Checkpoint) -> list[MixerShape]:
    """What to cut to: one shape, or with --state those to compare."""
    full, engine, round_to = checkpoint.shape, request.chosen_engine, request.round_to
    if engine:
        engine.check_model(checkpoint.architecture.model_type)
    if request.ratio is not None:
        # floor(d_k (1 - ratio)), then up to a multiple, and to what the engine takes.
        width, multiple = width_of(full.width, request.ratio), round_to or 1
        kept = rounded = min(full.width, -(-width // multiple) * multiple)
        if engine and (kept := engine.round_up(width, full, multiple)) != rounded:
            logger.info(
                "--for %s: %d channels per head instead of %d, as %s takes %s",
                *(engine.name, kept, rounded, engine.label, engine.widths()),
            )
        return [replace(full, width=kept)]
    if request.state is None:
        values = request.values or full.value_width
        cut = replace(full, width=request.keys or full.width, value_width=values)
        check_cut(checkpoint, cut, engine)
        return [cut]
    steps = STEPS if round_to is None else (round_to,)
    step, shapes = wanted_cuts(checkpoint, request.state, engine, steps)
    few = f": those of {steps[0]} are too few" if step < steps[0] else ""
    logger.info(
        "--state %g: %s d_k x d_v of %s (multiples of %d%s)",
        *(request.state, "comparing" if len(shapes) > 1 else "no choice but"),
        *(", ".join(map(in_words, shapes)), step, few),
    )
    return shapes


def written_dtype(request: Request, checkpoint: Checkpoint) -> torch.dtype | None:
    """What the weights become, or None if each keeps its own: float32 where a kernel takes it."""
    if request.dtype is None and not checkpoint.architecture.float32:
        dtypes = {tensor.dtype for _, tensor in checkpoint.headers() if tensor.is_floating_point()}
        if dtypes - {torch.bfloat16, torch.float16}:
            return torch.bfloat16
    return getattr(torch, request.dtype) if request.dtype else None


def pack_text(
    text: Path | None,
    checkpoint: Checkpoint,
    out: Path,
    *,
    slices: Mapping[str, int],
    length: int,
    seed: int,
) -> None:
    """Pack a text, or else the prose of the installed packages, with a model's own tokenizer."""
    tokenizer = load_tokenizer(checkpoint.folder)
    check_vocabulary(tokenizer, checkpoint.text_config["vocab_size"])
    if text is None:
        logger.info("text: the prose of the installed Python packages; give --text for your own")
    if "held_out" in slices:
        logger.info("text: %d sequences, and %d that are held out", *slices.values())
    pack(
        documentation() if text is None else read(text, seed=seed),
        tokenizer,
        out,
        sequence_length=length,
        sequences=slices,
        source=documentation_source() if text is None else describe(text),
        seed=seed,
        share_documents="held_out" in slices,  # a text file without blank lines is one document
    )


def calibrate_on(data: PackedTokens, request: Request, *, values: bool) -> Calibration:
    device = "the GPU" if request.device == "cuda" else "the CPU"
    logger.info("calibrating %s on %s", request.model, device)
    return calibrate_folder(
        request.model,
        data,
        name=data.manifest.source.name,
        sequences=request.sequences,
        rows=request.rows,
        seed=request.seed,
        device=request.device,
        batch=request.batch,
        gradients="gradients" in METHODS[request.method].needs,
        values=values,
    )


def choose(
    request: Request, statistics: ModelStatistics, shapes: Sequence[MixerShape]
) -> dict[MixerShape, Selection]:
    """Which channels each shape keeps. What the shapes share is computed once."""
    chosen: dict[tuple[Channels, int], Selection] = {}
    sides: tuple[Channels, Channels] = ("key", "value")
    for channels in sides:
        _, full = statistics.checkpoint.shape.size(channels)
        widths = sorted({shape.size(channels)[1] for shape in shapes} - {full})
        if widths:
            few = " and ".join(map(str, widths))
            what = f"{request.method} keeps {few} of {full} {channels} channels per head"
            logger.info("selecting: %s", what)
            given = {"target": request.target, "seed": request.seed, **request.options}
            results = select(request.method, statistics, widths, channels=channels, **given)
            chosen |= {(channels, width): s for width, s in zip(widths, results, strict=True)}
    selections = {}
    for shape in shapes:
        first, *rest = filter(None, (chosen.get((side, shape.size(side)[1])) for side in sides))
        selections[shape] = first.with_values(*rest) if rest else first
    return selections


def slice_and_refit(
    request: Request,
    checkpoint: Checkpoint,
    selections: Mapping[MixerShape, Selection],
    dtype: torch.dtype | None,
    packed: Path,
) -> Outcome:
    """Write the model, refitted on the text that it was calibrated on; of several the one that is
    best on the text held out, which nothing else has seen."""
    data = PackedTokens(packed, slice_name="calibration")
    ids = torch.from_numpy(data[:])
    out, device, batch = request.out, request.device, request.batch
    candidates: list[Candidate] = []
    with (
        TemporaryDirectory(prefix=f".{out.name}.", dir=existing_parent(out)) as folder,
        atomic_write(out, force=request.force, folder=True) as aside,
    ):
        sliced_folder, refitted_folder = Path(folder) / "sliced", Path(folder) / "refitted"
        before = measure({"before": checkpoint}, packed, device=device, batch=batch)
        for number, (shape, selection) in enumerate(selections.items(), 1):
            cut = f"cut {number} of {len(selections)}: d_k {shape.width}, d_v {shape.value_width}"
            logger.info(cut)
            changes = selection.changes()
            slice_model(checkpoint, **changes, out=sliced_folder, dtype=dtype, eps=request.eps)
            sliced = Checkpoint(sliced_folder)
            began = time.monotonic()
            result = refit(sliced, checkpoint, ids, device=device, batch=batch)
            seconds = time.monotonic() - began
            write_refitted(sliced, result, refitted_folder)
            models = {"cut": sliced, "refitted": Checkpoint(refitted_folder)}
            held_out = measure(models, packed, device=device, batch=batch)
            held_out = replace(held_out, perplexities=before.perplexities | held_out.perplexities)
            candidate = Candidate(
                selection,
                shape,
                parameters=sum(tensor.numel() for _, tensor in sliced.headers()),
                result=replace(result, weights={}),  # those of all would fill the memory
                seconds=seconds,
                text=data.manifest.source,
                held_out=held_out,
            )
            logger.info("%s: %s", cut, held_out.fact())
            candidates.append(candidate)
            if best(candidates) is candidate:
                shutil.rmtree(aside)
                refitted_folder.rename(aside)
            else:
                shutil.rmtree(refitted_folder)
            shutil.rmtree(sliced_folder)
        outcome = Outcome(request, checkpoint, best(candidates).selection, candidates)
        (aside / "README.md").write_text(outcome.card())
    return outcome
