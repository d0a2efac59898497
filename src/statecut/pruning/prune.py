"""The whole method on one model: calibrate, select, slice, refit, and report what changed."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch

from statecut.arguments import width as width_of
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.evaluation.perplexity import held_out_sequences, measure, pack_text
from statecut.files import atomic_write, check_disk_space, existing_parent, explain_full_disk
from statecut.hub import model_name
from statecut.models.checkpoint import Checkpoint, check_parameters, with_current_names
from statecut.models.kernels import checked_device
from statecut.models.shapes import Channels, MixerShape
from statecut.pruning.budget import in_words
from statecut.pruning.calibration import calibrate_folder
from statecut.pruning.refit import check_refit, refit, write_refitted
from statecut.pruning.request import Plan, Request
from statecut.pruning.select import select
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import check_sliceable, slice_model, sliced_dtype
from statecut.pruning.statistics import ModelStatistics
from statecut.record import Record

logger = logging.getLogger(__name__)

NEAR = 1.02  # times the best perplexity


@dataclass(frozen=True)
class Pruned:
    """A model that was written, and what is known of it. Printed, it is the summary."""

    folder: Path
    record: Record
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        warnings = (f"WARNING: {warning}" for warning in self.warnings)
        return "\n".join([*self.record.lines(), *warnings])


@dataclass(frozen=True)
class Candidate:
    """A cut, and its refit if there is one."""

    selection: Selection
    shape: MixerShape
    entry: Mapping[str, Any]  # `refit` and `measured` of the record

    def perplexity(self, model: str) -> float:
        return float(self.entry["measured"]["models"][model].get("perplexity", 0))

    @property
    def best(self) -> float:
        """Of the model that would be written."""
        models = self.entry["measured"]["models"]
        return min(self.perplexity(model) for model in models if model in ("cut", "refitted"))

    def row(self) -> str:
        """Of the table of all candidates."""
        parameters = self.entry["measured"]["models"]["cut"]["parameters"]
        return (
            f"{self.shape.width:3}  {self.shape.value_width:3}  {self.shape.state_bytes():13,}  "
            f"{parameters:14,}  {self.perplexity('cut'):15.2f}  "
            f"{self.perplexity('refitted'):9.2f}  {self.entry['refit']['seconds']:5.0f} s"
        )


HEAD = (f"d_k  d_v  {'state, bytes':>13}  {'parameters':>14}  {'perplexity: cut':>15}  "
        f"{'refitted':>9}  {'refit':>7}")  # fmt: skip


def run(request: Request, plan: Plan) -> Pruned:
    """Write the pruned model to `request.out`."""
    device, out = checked_device(request.device), Path(request.out)
    model = Checkpoint(plan.model.folder)
    dtype, bases = written_dtype(request, model), Record.read(model.folder).bases
    if bases and out.exists() and any(out.iterdir()) and Checkpoint(out).digest() in bases:
        raise InputError(f"{out}: {model.folder} was cut from it, and it would be lost")
    check_sliceable(model, values=plan.cuts_values)
    # The cut model is written beside OUT, refitted in another folder; the best until then is kept.
    copies = (2 if len(plan.shapes) == 1 else 3) if plan.refits else 1
    # Counted as if nothing was cut: keys and values are a small part of most models.
    size = sum(
        tensor.numel() * sliced_dtype(name, tensor, model.passthrough_prefixes, dtype).itemsize
        for name, tensor in with_current_names(model.headers(), model.architecture).items()
    )
    check_disk_space(out, copies * size)
    if plan.refits:
        check_refit(model, request.sequences, request.length)
    with TemporaryDirectory() as folder:
        packed, calibration = None, None
        if plan.runs_model:
            packed = Path(folder) / "text"
            slices = {"calibration": request.sequences}
            slices["held_out"] = held_out_sequences(request.sequences)
            sizes = {"length": request.length, "seed": request.seed}
            assert request.text is not None  # as the plan has checked
            with explain_full_disk(gettempdir()):
                pack_text(Path(request.text), model, packed, slices=slices, **sizes)
            check_parameters(model)  # which imports much
        if packed and plan.refits:
            ids = torch.from_numpy(PackedTokens(packed, slice_name="calibration")[:])
            check_refit(model, len(ids), request.length, ids)
        if packed and plan.calibrates:
            logger.info("calibrating %s on %s", model.folder, device)
            calibration = calibrate_folder(
                model.folder,
                data := PackedTokens(packed, slice_name="calibration"),
                name=data.manifest.source.name,
                sequences=request.sequences,
                rows=request.rows,
                seed=request.seed,
                device=device,
                batch=request.batch,
                gradients="gradients" in plan.method.needs,
                values=plan.cuts_values,
            )
        selections = choose(request, plan, ModelStatistics(model, calibration))
        if dtype and not request.dtype:
            logger.info(
                "written as bfloat16: DeltaNet's kernel refuses float32 (--dtype float32 keeps it)"
            )
        with explain_full_disk(out):
            return _write(request, plan, model, selections, dtype, packed, device)


def _write(
    request: Request,
    plan: Plan,
    model: Checkpoint,
    selections: Mapping[MixerShape, Selection],
    dtype: torch.dtype | None,
    packed: Path | None,
    device: str,
) -> Pruned:
    """Of several models the one that is best on the text held out, which nothing else has seen; a
    refit that makes that worse is left out."""
    out, candidates = Path(request.out), []
    with (
        TemporaryDirectory(prefix=f".{out.name}.", dir=existing_parent(out)) as beside,
        atomic_write(out, force=request.force, folder=True) as aside,
    ):
        measured = Measured(packed, device, request.batch)
        measured.add("before" if Record.read(model.folder).bases else "unpruned", model)
        for number, (shape, selection) in enumerate(selections.items(), 1):
            of = f"{number} of {len(selections)}: " if len(selections) > 1 else ""
            logger.info("slicing: %sd_k x d_v %s", of, in_words(shape))
            folders = {"cut": Path(beside) / "cut"}
            changes = selection.changes()
            slice_model(model, **changes, out=folders["cut"], dtype=dtype, eps=request.eps)
            cut = Checkpoint(folders["cut"])
            measured.add("cut", cut)
            entry: dict[str, Any] = {}
            if plan.refits and packed:
                folders["refitted"] = Path(beside) / "refitted"
                entry["refit"] = _refit(cut, model, packed, folders["refitted"], device, request)
                measured.add("refitted", Checkpoint(folders["refitted"]))
            entry["measured"] = measured.entry()
            candidate = Candidate(selection, shape, entry)
            candidates.append(candidate)
            written = min(folders, key=candidate.perplexity)
            if "refit" in entry:
                entry["refit"]["written"] = written == "refitted"
            if min(candidates, key=lambda candidate: candidate.best) is candidate:
                shutil.rmtree(aside)
                folders[written].rename(aside)
            for left in Path(beside).iterdir():
                shutil.rmtree(left)
        best = min(candidates, key=lambda candidate: candidate.best)
        warnings = tuple(_warnings(best, candidates))
        entry = {**best.entry, "notes": _notes(plan, model, best.shape, out.name, warnings)}
        if request.state is not None:
            rows = [c.row() + ("  written" if c is best else "") for c in candidates]
            entry["compared"] = [HEAD, *rows]
        cut_entry = best.selection.entry(model, request.eps)
        cut_entry |= {"default_method": request.method is None, "asked": _asked(request, model)}
        cut_entry |= {"engine": plan.engine.name} if plan.engine else {}
        record = Record.read(model.folder).then(
            base={"name": model_name(model.folder), "digest": model.digest()},
            cut=cut_entry,
            **entry,
            command=request.command(),
        )
        for file, text in record.files(out.name, model.config).items():
            (aside / file).write_text(text)
    return Pruned(out, record, warnings)


class Measured:
    """What is known of each model: sizes, and where there is text its perplexity."""

    def __init__(self, packed: Path | None, device: str, batch: int) -> None:
        self.packed, self.device, self.batch = packed, device, batch
        self.models: dict[str, dict[str, float]] = {}

    def add(self, name: str, model: Checkpoint) -> None:
        cache = model.architecture.cache(model.config)
        numbers: dict[str, float] = {
            "parameters": model.parameters,
            "recurrent_state_bytes": model.shape.state_bytes(),
            "cache_bytes_per_request": cache.state_bytes(),
        }
        if self.packed:
            numbers["perplexity"] = measure(model, self.packed, self.device, self.batch)
            logger.info("perplexity of the text held out, %s: %.2f", name, numbers["perplexity"])
        self.models[name] = numbers

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"models": dict(self.models)}
        if self.packed:
            held_out = PackedTokens(self.packed, slice_name="held_out")
            source = held_out.manifest.source
            entry |= {"text": source.name, "text_digest": source.revision}
            entry["tokens"] = len(held_out) * held_out.manifest.sequence_length
        return entry


def _refit(
    cut: Checkpoint, model: Checkpoint, packed: Path, out: Path, device: str, request: Request
) -> dict[str, Any]:
    data, began = PackedTokens(packed, slice_name="calibration"), time.monotonic()
    result = refit(cut, model, torch.from_numpy(data[:]), device=device, batch=request.batch)
    seconds = time.monotonic() - began
    write_refitted(cut, result, out)
    return {**result.entry(), "text": data.manifest.source.revision, "seconds": seconds}


def _asked(request: Request, model: Checkpoint) -> dict[str, int]:
    """The widths before they were rounded."""
    if request.ratio is None:
        return {}
    return {"keys": width_of(model.shape.width, request.ratio)}


def _notes(
    plan: Plan, model: Checkpoint, shape: MixerShape, out: str, warnings: Sequence[str]
) -> dict[str, str]:
    notes = {}
    if plan.engine:
        notes["engine"] = plan.engine.advice(model.architecture.model_type, shape, out)
    if model.passthrough:
        names = (
            n for n in model.passthrough_prefixes if any(t.startswith(n) for t in model.passthrough)
        )
        prefixes = ", ".join(names)
        notes["copied as they are"] = f"{len(model.passthrough)} tensors ({prefixes})"
    if warnings:
        notes["warning"] = "; ".join(warnings)
    return notes


def _warnings(best: Candidate, candidates: list[Candidate]) -> Iterator[str]:
    for side, short, heads in best.selection.filled_up():
        yield (
            f"in {short} of {heads} heads the sampled rows have fewer independent {side} than are "
            "kept, and the rest was filled up by number: give more --rows or --text"
        )
    if refitted := best.entry.get("refit"):
        if not refitted["written"]:
            yield (
                "the refit did not lower the perplexity of the text held out, so the cut alone was "
                "written: give more --sequences or --text to fit on"
            )
        near = [
            in_words(other.shape)
            for other in candidates
            if other is not best and other.best < NEAR * best.best
        ]
        if near:
            yield (
                f"within {NEAR - 1:.0%} of the best: {', '.join(near)}. Other text may choose "
                "otherwise: give more --sequences or --text"
            )


def written_dtype(request: Request, checkpoint: Checkpoint) -> torch.dtype | None:
    """What the weights become, or None if each keeps its own: float32 where a kernel takes it."""
    if request.dtype is None and not checkpoint.architecture.float32:
        dtypes = {tensor.dtype for _, tensor in checkpoint.headers() if tensor.is_floating_point()}
        if dtypes - {torch.bfloat16, torch.float16}:
            return torch.bfloat16
    return getattr(torch, request.dtype) if request.dtype else None


def choose(
    request: Request, plan: Plan, statistics: ModelStatistics
) -> dict[MixerShape, Selection]:
    """Which channels each shape keeps. What the shapes share is computed once."""
    chosen: dict[tuple[Channels, int], Selection] = {}
    sides: tuple[Channels, Channels] = ("key", "value")
    for channels in sides:
        _, full = statistics.checkpoint.shape.size(channels)
        widths = sorted({shape.size(channels)[1] for shape in plan.shapes} - {full})
        if widths:
            few = " and ".join(map(str, widths))
            what = f"{plan.method.name} keeps {few} of {full} {channels} channels per head"
            logger.info("selecting: %s", what)
            given = {"target": request.target, "seed": request.seed, **request.options}
            results = select(plan.method.name, statistics, widths, channels=channels, **given)
            chosen |= {(channels, width): s for width, s in zip(widths, results, strict=True)}
    selections = {}
    for shape in plan.shapes:
        first, *rest = filter(None, (chosen.get((side, shape.size(side)[1])) for side in sides))
        selections[shape] = first.with_values(*rest) if rest else first
    return selections
