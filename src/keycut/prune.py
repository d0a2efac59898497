"""The whole method on one model: calibrate, select, slice, refit, and report what changed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch

from keycut import REFIT
from keycut.artefact import (
    atomic_write,
    check_disk_space,
    check_not_overwriting,
    check_output_path,
    existing_parent,
    explain_full_disk,
)
from keycut.calibration import Calibration, calibrate_folder
from keycut.config import width as width_of
from keycut.config.section import check_seed
from keycut.data.documentation import documentation, documentation_source
from keycut.data.packing import PackedTokens, pack
from keycut.data.sources import Source, describe, read
from keycut.data.tokenizer import check_vocabulary, load_tokenizer
from keycut.engines import computed_wrong, engine_named
from keycut.errors import InputError
from keycut.models.card import card, pruned_facts, ratio_in_words, refitted_facts
from keycut.models.checkpoint import Checkpoint, check_parameters
from keycut.refit import HELD_OUT, Refit, check_refit, perplexity, refit, write_refitted
from keycut.selection.method import Target
from keycut.selection.methods import METHODS, method_named
from keycut.selection.select import select
from keycut.selection.selection import Selection
from keycut.selection.statistics import ModelStatistics
from keycut.slicing import check_sliceable, slice_model, sliced_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What `keycut prune` was asked for."""

    model: Path
    out: Path
    method: str
    ratio: float
    target: Target | None = None  # the method's own
    text: Path | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # that the method takes
    sequences: int = 128
    length: int = 2048
    sample_rows: int = 5000
    batch: int = 8
    round_to: int = 1
    engine: str | None = None  # that is to compute this width right
    refit: bool = REFIT
    dtype: torch.dtype | None = None  # the model's own
    device: str = "cpu"
    force: bool = False


@dataclass(frozen=True)
class HeldOut:
    """Perplexities on text that nothing else has seen, by what each is of."""

    perplexities: dict[str, float]
    tokens: int

    def line(self) -> str:
        values = " -> ".join(f"{value:.2f}" for value in self.perplexities.values())
        names = ", ".join(self.perplexities)
        return f"perplexity           {values} ({names}; {self.tokens:,} tokens held out)"

    def fact(self) -> str:
        """The same for a card."""
        values = ", ".join(f"{value:.2f} {name}" for name, value in self.perplexities.items())
        return f"{values}, on {self.tokens:,} tokens held out"


@dataclass(frozen=True)
class Refitting:
    """What a refit did, on which text, and what it brought."""

    result: Refit
    seconds: float
    text: Source
    held_out: HeldOut

    def lines(self) -> list[str]:
        lines = [
            self.held_out.line(),
            f"refit                {len(self.result.fits)} matrices in {self.seconds:.0f} s",
        ]
        return [*lines, self.caution()] if self.caution() else lines

    def caution(self) -> str:
        """What to know of a refit that did not help, if it did not."""
        whole, cut, refitted = self.held_out.perplexities.values()
        if refitted < cut:
            return ""
        if cut <= whole:
            return (
                "CAUTION: the cut did no damage to the text held out, and the refit made it worse"
            )
        return (
            "CAUTION: the refit did not lower the perplexity of the text held out: give more "
            "--sequences or --text, or --no-refit"
        )

    def facts(self, teacher: Checkpoint) -> dict[str, object]:
        return {
            **refitted_facts(self.result, teacher),
            "text of the refit": f"{self.text.name} ({self.text.revision})",
            "perplexity": self.held_out.fact() + (f". {self.caution()}" if self.caution() else ""),
            "seconds of the refit": f"{self.seconds:.0f}",
        }


def prune(request: Request) -> list[str]:
    """Write the pruned model to `request.out`. What changed, in lines."""
    check_options(request)
    method = METHODS[request.method]
    checkpoint = Checkpoint(request.model)
    width = kept_width(request, checkpoint)
    dtype = written_dtype(request, checkpoint)
    # A method that needs no text is not calibrated for the refit's sake.
    calibrates = "text" in method.needs or (request.text is not None and not request.refit)
    if calibrates:
        checkpoint.check_no_softmax()
    check_model(request, checkpoint, width, dtype)
    if calibrates or request.refit:
        check_parameters(checkpoint)

    with TemporaryDirectory() as folder:
        packed, calibration = Path(folder) / "text", None
        if calibrates or request.refit:
            slices = {"calibration": request.sequences}
            if request.refit:
                slices["held_out"] = held_out_sequences(request.sequences)
            with explain_full_disk(gettempdir()):
                pack_text(
                    request.text,
                    checkpoint,
                    packed,
                    slices=slices,
                    length=request.length,
                    seed=request.seed,
                )
        if calibrates:
            calibration = calibrate_on(PackedTokens(packed, slice_name="calibration"), request)
        full = checkpoint.shape.width
        logger.info("selecting: %s keeps %d of %d channels a head", request.method, width, full)
        (selection,) = select(
            request.method,
            ModelStatistics(checkpoint, calibration),
            [width],
            target=request.target or method.targets[0],
            seed=request.seed,
            **request.options,
        )
        logger.info("slicing: writing %s", request.out)
        if beyond := checkpoint.beyond:
            logger.info(
                "copied as they are: %d tensors beyond the text model (%s)",
                len(beyond), ", ".join(checkpoint.architecture.beyond),
            )  # fmt: skip
        if dtype != request.dtype:
            logger.info(
                "written as bfloat16: DeltaNet's kernel refuses float32 (--dtype float32 keeps it)"
            )
        refitting = None
        with explain_full_disk(request.out):
            if request.refit:
                refitting = slice_and_refit(request, checkpoint, selection, dtype, packed)
            else:
                slice_model(
                    checkpoint,
                    selection.change(),
                    request.out,
                    dtype=dtype,
                    card=pruned_card(request, checkpoint, selection),
                    force=request.force,
                )
    pruned = Checkpoint(request.out)
    lines = summary(request, checkpoint, pruned, selection)
    if refitting:
        lines += refitting.lines()
    if request.engine:
        lines.append(f"engine               {engine_named(request.engine).advice(pruned.shape)}")
    else:
        lines += computed_wrong(
            checkpoint.architecture.model_type, pruned.shape.width, checkpoint.shape
        )
    return lines


def check_options(request: Request) -> None:
    """An error for what is wrong whatever the model."""
    method = method_named(request.method)
    method.check_target(request.target or method.targets[0])
    method.options(request.options)
    if not 0 < request.ratio < 1:
        raise InputError(
            f"--ratio {request.ratio:g}: must lie in (0, 1), it is the share of key channels to cut"
        )
    for name, value in (
        ("--sequences", request.sequences),
        ("--length", request.length),
        ("--rows", request.sample_rows),
        ("--batch", request.batch),
        ("--round-to", request.round_to),
    ):
        if value < 1:
            raise InputError(f"{name} {value}: must be 1 or more")
    check_seed(request.seed)
    if request.engine is not None:
        engine_named(request.engine)


def check_model(
    request: Request, checkpoint: Checkpoint, width: int, dtype: torch.dtype | None
) -> None:
    """An error if the model cannot be cut to that width, refitted, or written."""
    check_sliceable(checkpoint)
    full = checkpoint.shape.width
    if width == full:
        raise InputError(
            f"--round-to {request.round_to} leaves all {full} channels of a head at ratio "
            f"{request.ratio}: round to less, or cut more"
        )
    if request.refit:
        check_refit(checkpoint, sequences=request.sequences, length=request.length)
    check_out(request.out, [request.model], request.text, force=request.force)
    size = sliced_bytes(checkpoint, width, dtype)
    # The refit reads the sliced model from files, too.
    check_disk_space(request.out, 2 * size if request.refit else size)


def check_out(out: Path, models: list[Path], text: Path | None, *, force: bool) -> None:
    """An error if a model made from others, and from a text, may not be written there."""
    check_output_path(out, force=force)
    sources = models if text is None else [*models, text]
    check_not_overwriting(out, sources, kind="model", mark="config.json")
    if any(model.resolve() in out.resolve().parents for model in models):
        raise InputError(f"{out}: lies in the model's own folder; give one outside of it")


def kept_width(request: Request, checkpoint: Checkpoint) -> int:
    """floor(d_k (1 - ratio)), then up to a multiple of --round-to, and to what the engine takes;
    never above d_k."""
    full, round_to = checkpoint.shape.width, request.round_to
    width = width_of(full, request.ratio)
    rounded = min(full, -(-width // round_to) * round_to)
    if request.engine is None:
        return rounded
    engine = engine_named(request.engine)
    engine.check_model(checkpoint.architecture.model_type)
    kept = engine.round_up(width, checkpoint.shape, round_to)
    if kept != rounded:
        logger.info(
            "--for %s: %d channels a head instead of %d, as %s takes %s",
            *(engine.name, kept, rounded, engine.label, engine.widths()),
        )
    return kept


def written_dtype(request: Request, checkpoint: Checkpoint) -> torch.dtype | None:
    """What the weights become, or None if each keeps its own: float32 where a kernel takes it."""
    if request.dtype is None and not checkpoint.architecture.float32:
        dtypes = {tensor.dtype for _, tensor in checkpoint.headers() if tensor.is_floating_point()}
        if dtypes - {torch.bfloat16, torch.float16}:
            return torch.bfloat16
    return request.dtype


def held_out_sequences(sequences: int) -> int:
    """How many to compute perplexities on, beside so many that are used."""
    return min(16, math.ceil(sequences / HELD_OUT))


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


def calibrate_on(data: PackedTokens, request: Request) -> Calibration:
    device = "the GPU" if request.device == "cuda" else "the CPU"
    logger.info("calibrating %s on %s", request.model, device)
    return calibrate_folder(
        request.model,
        data,
        name=data.manifest.source.name,
        sequences=request.sequences,
        rows=request.sample_rows,
        seed=request.seed,
        device=request.device,
        batch=request.batch,
        gradients="gradients" in METHODS[request.method].needs,
    )


def slice_and_refit(
    request: Request,
    checkpoint: Checkpoint,
    selection: Selection,
    dtype: torch.dtype | None,
    packed: Path,
) -> Refitting:
    """Write the model, refitted on the text that it was calibrated on."""
    data = PackedTokens(packed, slice_name="calibration")
    out, device, batch = request.out, request.device, request.batch
    with TemporaryDirectory(prefix=f".{out.name}.", dir=existing_parent(out)) as folder:
        slice_model(checkpoint, selection.change(), Path(folder) / "sliced", dtype=dtype)
        sliced = Checkpoint(Path(folder) / "sliced")
        began = time.monotonic()
        result = refit(sliced, checkpoint, torch.from_numpy(data[:]), device=device, batch=batch)
        seconds = time.monotonic() - began
        with atomic_write(out, force=request.force, folder=True) as aside:
            write_refitted(sliced, result, aside, force=True)
            models = {"unpruned": checkpoint, "cut": sliced, "refitted": Checkpoint(aside)}
            held_out = measure(models, packed, device=device, batch=batch)
            refitting = Refitting(result, seconds, data.manifest.source, held_out)
            readme = pruned_card(request, checkpoint, selection, refitting)
            (aside / "README.md").write_text(readme)
    return refitting


def measure(
    models: Mapping[str, Checkpoint], packed: Path, *, device: str, batch: int = 8
) -> HeldOut:
    """The perplexity of each model on the text held out."""
    ids = torch.from_numpy(PackedTokens(packed, slice_name="held_out")[:])
    logger.info("perplexity of %s", ", ".join(models))
    values = {n: perplexity(c, ids, device=device, batch=batch) for n, c in models.items()}
    return HeldOut(values, ids.numel())


def summary(
    request: Request, before: Checkpoint, after: Checkpoint, selection: Selection
) -> list[str]:
    """What changed, in lines."""
    widths = (before.shape.width, after.shape.width)
    ratio = ratio_in_words(request.ratio, widths[1], widths[0])
    counts = [sum(t.numel() for _, t in c.headers()) for c in (before, after)]
    states = [c.shape.state_bytes() for c in (before, after)]
    lines = [
        f"key channels a head  {widths[0]} -> {widths[1]}"
        + (f" (ratio {ratio})" if ratio != str(request.ratio) else ""),
        f"parameters           {counts[0]:,} -> {counts[1]:,}",
        f"recurrent state      {states[0]:,} -> {states[1]:,} bytes",
    ]
    if "condition_before" in selection.tensors:
        conditions = [selection.tensors[f"condition_{w}"].median() for w in ("before", "after")]
        ranks = [selection.tensors[f"effective_rank_{w}"].mean() for w in ("before", "after")]
        lines += [
            f"condition of keys    {conditions[0]:.3g} -> {conditions[1]:.3g} (median of heads)",
            f"their effective rank {ranks[0]:.3g} -> {ranks[1]:.3g} (mean of heads)",
        ]
    else:
        why = "and the text was for the refit" if request.refit else "and none was given"
        lines.append(f"condition of keys    not known: {request.method} needs no text, {why}")
    if "swaps" in selection.tensors:
        swaps = selection.tensors["swaps"]
        lines.append(f"swaps made           {int(swaps.sum())} in {swaps.numel()} heads")
        if short := int(selection.tensors["log_volume"].isneginf().sum()):
            lines.append(
                f"CAUTION: in {short} of {swaps.numel()} heads the sampled rows have fewer "
                "independent channels than are kept, and the rest was filled up by number: give "
                "more --rows or --text"
            )
    return lines


def pruned_card(
    request: Request,
    checkpoint: Checkpoint,
    selection: Selection,
    refitting: Refitting | None = None,
) -> str:
    """README.md of the model: what it is and how it was made."""
    options = (
        f"--method {request.method} --ratio {request.ratio} --target {selection.about['target']} "
        f"--seed {request.seed} --round-to {request.round_to} --sequences {request.sequences} "
        f"--length {request.length} --rows {request.sample_rows} "
        f"--{'' if request.refit else 'no-'}refit"
        + "".join(f" {o.flag} {selection.about[o.name]}" for o in METHODS[request.method].takes)
        + (f" --for {request.engine}" if request.engine else "")
        + (f" --dtype {str(request.dtype).removeprefix('torch.')}" if request.dtype else "")
        + (f" --text {request.text.name}" if request.text else "")
    )
    facts = pruned_facts(selection, request.ratio)
    if request.engine:
        facts["engine"] = engine_named(request.engine).advice(
            replace(checkpoint.shape, width=selection.width)
        )
    return card(
        request.out.name,
        f"{request.model.name} with fewer key and query channels, pruned by Keycut.",
        facts | (refitting.facts(checkpoint) if refitting else {}),
        command=f"keycut prune {request.model.name} {request.out.name} {options}",
        config=checkpoint.config,
        base=request.model.name,
    )
