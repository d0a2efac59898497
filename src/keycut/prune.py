"""The whole method on one model: calibrate, select, slice, refit, and report what changed."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Literal

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
from keycut.models.architectures.base import MixerShape
from keycut.models.card import card, pruned_facts, ratio_in_words, refitted_facts
from keycut.models.checkpoint import Checkpoint, check_parameters
from keycut.refit import HELD_OUT, Refit, check_refit, perplexity, refit, write_refitted
from keycut.selection.method import Target
from keycut.selection.methods import METHODS, method_named
from keycut.selection.select import check_chooses_values, select, select_values
from keycut.selection.selection import Selection
from keycut.selection.statistics import ModelStatistics
from keycut.slicing import check_sliceable, slice_model, sliced_bytes
from keycut.splits import STEPS, Split, check_split, no_split, splits_within, whole

logger = logging.getLogger(__name__)

NEAR = 1.02  # times the best perplexity


@dataclass(frozen=True)
class Request:
    """What `keycut prune` was asked for. How much to cut is said by one of `ratio`, `state`, or
    `keys` and `values`, or one of these two."""

    model: Path
    out: Path
    method: str
    ratio: float | None = None  # share of the key channels that goes
    state: float | None = None  # share of the recurrent state that may stay
    keys: int | None = None  # channels a head that stay; all if only values are given
    values: int | None = None
    target: Target | None = None  # the method's own
    text: Path | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # that the method takes
    sequences: int = 128
    length: int = 2048
    sample_rows: int = 5000
    batch: int = 8
    round_to: int | None = None  # multiples of it are kept
    engine: str | None = None  # that is to compute these widths right
    refit: bool | None = None  # if not said, what a comparison needs, or the default
    dtype: torch.dtype | None = None  # the model's own
    device: str = "cpu"
    force: bool = False

    @property
    def refits(self) -> bool:
        if self.refit is None:
            return self.state is not None or REFIT
        return self.refit

    @property
    def wanted(self) -> str:
        """How much to cut, as the command line has it."""
        flags = {name: getattr(self, name) for name in ("ratio", "state", "keys", "values")}
        return " ".join(f"--{name} {value}" for name, value in flags.items() if value is not None)


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
    without: str = "--no-refit"  # how to have the same cut as it is

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
            f"--sequences or --text, or {self.without}"
        )

    def facts(self, teacher: Checkpoint) -> dict[str, object]:
        return {
            **refitted_facts(self.result, teacher),
            "text of the refit": f"{self.text.name} ({self.text.revision})",
            "perplexity": self.held_out.fact() + (f". {self.caution()}" if self.caution() else ""),
            "seconds of the refit": f"{self.seconds:.0f}",
        }


@dataclass(frozen=True)
class Candidate:
    """A split of the state that was tried."""

    split: Split
    selection: Selection
    state_bytes: int
    parameters: int
    refitting: Refitting

    @property
    def perplexity(self) -> float:
        return self.refitting.held_out.perplexities["refitted"]

    def line(self) -> str:
        _, cut, refitted = self.refitting.held_out.perplexities.values()
        return (
            f"{self.split.width:3}  {self.split.value_width:3}  {self.state_bytes:13,}  "
            f"{self.parameters:14,}  {cut:15.2f}  {refitted:9.2f}  {self.refitting.seconds:5.0f} s"
        )


@dataclass(frozen=True)
class SplitComparison:
    """All splits that were tried. The best is the one with the lowest perplexity on text held out,
    the first of equals."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=lambda candidate: candidate.perplexity)

    def lines(self) -> list[str]:
        """A table."""
        return [
            f"d_k  d_v  {'state, bytes':>13}  {'parameters':>14}  {'perplexity: cut':>15}  "
            f"{'refitted':>9}  {'refit':>7}",
            *(c.line() + ("  written" if c is self.best else "") for c in self.candidates),
        ]

    def caution(self) -> list[str]:
        """Those that other text might prefer."""
        near = [
            str(candidate.split)
            for candidate in self.candidates
            if candidate is not self.best and candidate.perplexity < NEAR * self.best.perplexity
        ]
        if not near:
            return []
        return [
            f"CAUTION: within {NEAR - 1:.0%} of the best: {', '.join(near)}. Other text may choose "
            "otherwise: give more --sequences or --text"
        ]


def prune(request: Request) -> list[str]:
    """Write the pruned model to `request.out`. What changed, in lines."""
    check_options(request)
    method = METHODS[request.method]
    checkpoint = Checkpoint(request.model)
    splits = wanted_splits(request, checkpoint)
    cuts_values = any(split.value_width < checkpoint.shape.value_width for split in splits)
    dtype = written_dtype(request, checkpoint)
    # A method that needs no text is not calibrated for the refit's sake.
    calibrates = "text" in method.needs or (request.text is not None and not request.refits)
    if calibrates:
        checkpoint.check_no_softmax()
    check_model(request, checkpoint, splits, dtype)
    if calibrates or request.refits:
        check_parameters(checkpoint)

    with TemporaryDirectory() as folder:
        packed, calibration = Path(folder) / "text", None
        if calibrates or request.refits:
            slices = {"calibration": request.sequences}
            if request.refits:
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
            data = PackedTokens(packed, slice_name="calibration")
            calibration = calibrate_on(data, request, values=cuts_values)
        selections = choose(request, ModelStatistics(checkpoint, calibration), splits)
        if request.state is None:
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
        comparison = None
        with explain_full_disk(request.out):
            if request.refits:
                comparison = slice_and_refit(request, checkpoint, selections, dtype, packed)
                selection = comparison.best.selection
            else:
                (selection,) = selections.values()
                slice_model(
                    checkpoint,
                    selection.change(),
                    request.out,
                    values=selection.value_change(),
                    dtype=dtype,
                    card=pruned_card(request, checkpoint, selection),
                    force=request.force,
                )
    pruned = Checkpoint(request.out)
    lines = summary(request, checkpoint, pruned, selection)
    if comparison:
        lines += comparison.best.refitting.lines()
        if request.state is not None:
            lines = [*comparison.lines(), "", *lines, *comparison.caution()]
    if request.engine:
        lines.append(f"engine               {engine_named(request.engine).advice(pruned.shape)}")
    else:
        model_type = checkpoint.architecture.model_type
        lines += computed_wrong(
            model_type, pruned.shape, checkpoint.shape, by_ratio=request.ratio is not None
        )
    return lines


def check_options(request: Request) -> None:
    """An error for what is wrong whatever the model."""
    method = method_named(request.method)
    method.check_target(request.target or method.targets[0])
    options = method.options(request.options)
    check_wanted(request)
    if request.state is not None or request.values is not None:
        check_chooses_values(method, options)
    for name, value in (
        ("--sequences", request.sequences),
        ("--length", request.length),
        ("--rows", request.sample_rows),
        ("--batch", request.batch),
        ("--round-to", request.round_to),
    ):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: must be 1 or more")
    if request.text is not None and not request.text.exists():
        raise InputError(f"{request.text}: no such file or folder")
    check_seed(request.seed)
    if request.engine is not None:
        engine_named(request.engine)


def check_wanted(request: Request) -> None:
    """An error unless it is said once how much to cut, and sensibly."""
    ways = [
        request.ratio is not None,
        request.state is not None,
        request.keys is not None or request.values is not None,
    ]
    if sum(ways) != 1:
        raise InputError(
            f"{request.wanted or 'how much to cut is missing'}: give one of --ratio, --state, or "
            "--keys and --values (one of these or both)"
        )
    if request.ratio is not None and not 0 < request.ratio < 1:
        raise InputError(
            f"--ratio {request.ratio:g}: must lie in (0, 1), it is the share of key channels to cut"
        )
    if request.state is not None:
        if not 0 < request.state < 1:
            raise InputError(
                f"--state {request.state:g}: must lie in (0, 1), it is the share of the recurrent "
                "state that may stay"
            )
        if request.refit is False:
            raise InputError(
                "--no-refit: --state compares models that are refitted, which decides between "
                "them; give --keys and --values to cut without"
            )
    for name, value in (("--keys", request.keys), ("--values", request.values)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: must be 1 or more")
        if value is not None and request.round_to is not None:
            raise InputError(
                f"--round-to {request.round_to}: {name} {value} is not rounded; leave one out"
            )


def check_model(
    request: Request, checkpoint: Checkpoint, splits: Sequence[Split], dtype: torch.dtype | None
) -> None:
    """An error if the model cannot be cut to these widths, refitted, or written."""
    full = whole(checkpoint.shape)
    check_sliceable(checkpoint, values=any(s.value_width < full.value_width for s in splits))
    if full in splits:
        raise InputError(
            f"--round-to {request.round_to} leaves all {full.width} channels of a head at ratio "
            f"{request.ratio}: round to less, or cut more"
        )
    if request.refits:
        check_refit(checkpoint, sequences=request.sequences, length=request.length)
    check_out(request.out, [request.model], request.text, force=request.force)
    size = max(
        sliced_bytes(
            checkpoint, s.width, dtype, s.value_width if s.value_width < full.value_width else None
        )
        for s in splits
    )
    # The refit reads the sliced model from files, too; of several the best until then is kept.
    copies = (2 if len(splits) == 1 else 3) if request.refits else 1
    check_disk_space(request.out, copies * size)


def check_out(out: Path, models: list[Path], text: Path | None, *, force: bool) -> None:
    """An error if a model made from others, and from a text, may not be written there."""
    check_output_path(out, force=force)
    sources = models if text is None else [*models, text]
    check_not_overwriting(out, sources, kind="model", mark="config.json")
    if any(model.resolve() in out.resolve().parents for model in models):
        raise InputError(f"{out}: lies in the model's own folder; give one outside of it")


def wanted_splits(request: Request, checkpoint: Checkpoint) -> list[Split]:
    """The widths to cut to: one pair of them, or with --state those to compare."""
    shape = checkpoint.shape
    if request.ratio is not None:
        return [Split(kept_width(request, checkpoint, request.ratio), shape.value_width)]
    engine = engine_named(request.engine) if request.engine is not None else None
    if engine:
        engine.check_model(checkpoint.architecture.model_type)
    if request.state is None:
        split = Split(request.keys or shape.width, request.values or shape.value_width)
        check_split(checkpoint, split, engine)
        return [split]
    steps = STEPS if request.round_to is None else (request.round_to,)
    step, splits = splits_within(checkpoint, request.state, engine, steps)
    if not splits:
        raise no_split(checkpoint, request.state, engine, steps)
    few = f": those of {steps[0]} are too few" if step < steps[0] else ""
    logger.info(
        "--state %g: %s d_k x d_v of %s (multiples of %d%s)",
        request.state, "comparing" if len(splits) > 1 else "no choice but",
        ", ".join(map(str, splits)), step, few,
    )  # fmt: skip
    return splits


def kept_width(request: Request, checkpoint: Checkpoint, ratio: float) -> int:
    """floor(d_k (1 - ratio)), then up to a multiple of --round-to, and to what the engine takes;
    never above d_k."""
    full, round_to = checkpoint.shape.width, request.round_to or 1
    width = width_of(full, ratio)
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


def calibrate_on(data: PackedTokens, request: Request, *, values: bool) -> Calibration:
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
        values=values,
    )


def choose(
    request: Request, statistics: ModelStatistics, splits: Sequence[Split]
) -> dict[Split, Selection]:
    """Which channels each split keeps. What the splits share is computed once."""
    full = whole(statistics.checkpoint.shape)
    widths = sorted({split.width for split in splits} - {full.width})
    value_widths = sorted({split.value_width for split in splits} - {full.value_width})
    for chosen, limit, name in (
        (widths, full.width, ""),
        (value_widths, full.value_width, "value "),
    ):
        if chosen:
            logger.info(
                "selecting: %s keeps %s of %d %schannels a head",
                request.method, " and ".join(map(str, chosen)), limit, name,
            )  # fmt: skip
    options: dict[str, Any] = {"seed": request.seed, **request.options}
    keys: dict[int, Selection] = {}
    values: dict[int, Selection] = {}
    if widths:
        target = request.target or METHODS[request.method].targets[0]
        results = select(request.method, statistics, widths, target=target, **options)
        keys = dict(zip(widths, results, strict=True))
    if value_widths:
        results = select_values(request.method, statistics, value_widths, **options)
        values = dict(zip(value_widths, results, strict=True))
    selections = {}
    for split in splits:
        of_keys, of_values = keys.get(split.width), values.get(split.value_width)
        selection = (
            of_keys.with_values(of_values) if of_keys and of_values else of_keys or of_values
        )
        assert selection, "a split cuts keys or values"
        selections[split] = selection
    return selections


def slice_and_refit(
    request: Request,
    checkpoint: Checkpoint,
    selections: Mapping[Split, Selection],
    dtype: torch.dtype | None,
    packed: Path,
) -> SplitComparison:
    """Write the model, refitted on the text that it was calibrated on; of several the one that is
    best on the text held out, which nothing else has seen."""
    data = PackedTokens(packed, slice_name="calibration")
    ids = torch.from_numpy(data[:])
    out, device, batch = request.out, request.device, request.batch
    comparison = SplitComparison(())
    with (
        TemporaryDirectory(prefix=f".{out.name}.", dir=existing_parent(out)) as folder,
        atomic_write(out, force=request.force, folder=True) as aside,
    ):
        sliced_folder, refitted_folder = Path(folder) / "sliced", Path(folder) / "refitted"
        unpruned = measure({"unpruned": checkpoint}, packed, device=device, batch=batch)
        for number, (split, selection) in enumerate(selections.items(), 1):
            if request.state is not None:
                logger.info(
                    "split %d of %d: d_k %d, d_v %d",
                    number, len(selections), split.width, split.value_width,
                )  # fmt: skip
            slice_model(
                checkpoint,
                selection.change(),
                sliced_folder,
                values=selection.value_change(),
                dtype=dtype,
            )
            sliced = Checkpoint(sliced_folder)
            began = time.monotonic()
            result = refit(sliced, checkpoint, ids, device=device, batch=batch)
            seconds = time.monotonic() - began
            write_refitted(sliced, result, refitted_folder)
            models = {"cut": sliced, "refitted": Checkpoint(refitted_folder)}
            held_out = measure(models, packed, device=device, batch=batch)
            held_out = replace(held_out, perplexities=unpruned.perplexities | held_out.perplexities)
            refitting = Refitting(
                replace(result, weights={}),  # those of all candidates would fill the memory
                seconds,
                data.manifest.source,
                held_out,
            )
            if request.state is not None:
                refitting = replace(refitting, without=f"{split.options()} --no-refit")
            candidate = Candidate(
                split,
                selection,
                state_bytes=sliced.shape.state_bytes(),
                parameters=sum(tensor.numel() for _, tensor in sliced.headers()),
                refitting=refitting,
            )
            comparison = SplitComparison((*comparison.candidates, candidate))
            if comparison.best is candidate:
                shutil.rmtree(aside)
                refitted_folder.rename(aside)
            else:
                shutil.rmtree(refitted_folder)
            shutil.rmtree(sliced_folder)
            if request.state is not None:
                logger.info("split %d of %d: %s", number, len(selections), held_out.fact())
        readme = pruned_card(request, checkpoint, comparison.best.selection, comparison)
        (aside / "README.md").write_text(readme)
    return comparison


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
    value_widths = (before.shape.value_width, after.shape.value_width)
    counts = [sum(t.numel() for _, t in c.headers()) for c in (before, after)]
    states = [c.shape.state_bytes() for c in (before, after)]
    lines = [f"key channels a head  {widths[0]} -> {widths[1]}"]
    if request.ratio is not None:
        ratio = ratio_in_words(request.ratio, widths[1], widths[0])
        lines[0] += f" (ratio {ratio})" if ratio != str(request.ratio) else ""
    else:
        lines.append(f"value channels       {value_widths[0]} -> {value_widths[1]}")
    lines += [
        f"parameters           {counts[0]:,} -> {counts[1]:,}",
        f"recurrent state      {states[0]:,} -> {states[1]:,} bytes",
    ]
    if request.state is not None:
        lines[-1] += f" ({state_in_words(request.state, before.shape, after.shape)})"
    if widths[0] > widths[1]:
        lines += choice_lines(request, selection.tensors, "keys")
    if value_widths[0] > value_widths[1]:
        prefix = "values."
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in selection.tensors.items()
            if name.startswith(prefix)
        }
        lines += choice_lines(request, tensors, "values")
    return lines


def state_in_words(asked: float, before: MixerShape, after: MixerShape) -> str:
    kept = after.state_bytes() / before.state_bytes()
    return f"{asked:g} asked, {kept:.3g} kept"


def choice_lines(
    request: Request, tensors: Mapping[str, torch.Tensor], channels: Literal["keys", "values"]
) -> list[str]:
    """What is known of the channels that were chosen."""
    condition = f"{f'condition of {channels}':20}"
    lines = []
    if "condition_before" in tensors:
        conditions = [tensors[f"condition_{w}"].median() for w in ("before", "after")]
        ranks = [tensors[f"effective_rank_{w}"].mean() for w in ("before", "after")]
        lines += [
            f"{condition} {conditions[0]:.3g} -> {conditions[1]:.3g} (median of heads)",
            f"their effective rank {ranks[0]:.3g} -> {ranks[1]:.3g} (mean of heads)",
        ]
    else:
        why = "and the text was for the refit" if request.refits else "and none was given"
        lines.append(f"{condition} not known: {request.method} needs no text, {why}")
    if "swaps" in tensors:
        swaps = tensors["swaps"]
        name = "swaps made" if channels == "keys" else "swaps of values"
        lines.append(f"{name:20} {int(swaps.sum())} in {swaps.numel()} heads")
        if short := int(tensors["log_volume"].isneginf().sum()):
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
    comparison: SplitComparison | None = None,
) -> str:
    """README.md of the model: what it is and how it was made."""
    method = METHODS[request.method]
    values = method.options(request.options)
    options = (
        f"--method {request.method} {request.wanted} --target "
        f"{request.target or method.targets[0]} "
        f"--seed {request.seed} --sequences {request.sequences} "
        f"--length {request.length} --rows {request.sample_rows} "
        f"--{'' if request.refits else 'no-'}refit"
        + "".join(f" {option.flag} {values[option.name]}" for option in method.takes)
        + (f" --round-to {request.round_to}" if request.round_to else "")
        + (f" --for {request.engine}" if request.engine else "")
        + (f" --dtype {str(request.dtype).removeprefix('torch.')}" if request.dtype else "")
        + (f" --text {request.text.name}" if request.text else "")
    )
    facts = pruned_facts(selection, request.ratio)
    shape = cut_shape(checkpoint, selection)
    table: list[str] = []
    if request.state is not None and comparison:
        facts["state"] = state_in_words(request.state, checkpoint.shape, shape)
        table = comparison.lines()
    if request.engine:
        facts["engine"] = engine_named(request.engine).advice(shape)
    if comparison:
        facts |= comparison.best.refitting.facts(checkpoint)
    return card(
        request.out.name,
        f"{request.model.name} with {what_is_fewer(selection)}",
        facts,
        table=table,
        command=f"keycut prune {request.model.name} {request.out.name} {options}",
        config=checkpoint.config,
        base=request.model.name,
    )


def cut_shape(checkpoint: Checkpoint, selection: Selection) -> MixerShape:
    """Of the model with the channels that a selection keeps."""
    shape = checkpoint.shape
    if keys := selection.change():
        shape = replace(shape, width=keys.width)
    if values := selection.value_change():
        shape = replace(shape, value_width=values.width)
    return shape


def what_is_fewer(selection: Selection) -> str:
    """The first sentence of a card, and what to know of cut values."""
    if not selection.value_change():
        return "fewer key and query channels, pruned by Keycut."
    channels = "key, query and value" if selection.change() else "value"
    return (
        f"fewer {channels} channels, pruned by Keycut. The norm in front of the output projection "
        "is over fewer channels, too, and its weight is folded into the projection."
    )
