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
from typing import Any

import torch

from statecut import REFIT
from statecut.arguments import Eps, Target, check_counts, check_seed
from statecut.arguments import width as width_of
from statecut.data.documentation import documentation, documentation_source
from statecut.data.packing import PackedTokens, pack
from statecut.data.sources import describe, read, text_files
from statecut.data.tokenizer import check_vocabulary, load_tokenizer
from statecut.errors import InputError
from statecut.files import (
    atomic_write,
    check_disk_space,
    check_not_overwriting,
    check_output_path,
    existing_parent,
    explain_full_disk,
)
from statecut.models.checkpoint import Checkpoint, check_parameters
from statecut.pruning.budget import STEPS, Split, check_split, no_split, splits_within, whole
from statecut.pruning.calibration import Calibration, calibrate_folder
from statecut.pruning.methods import METHODS, method_named
from statecut.pruning.outcome import (
    Candidate,
    HeldOut,
    Refitting,
    SplitComparison,
    cautions,
    pruned_card,
    summary,
)
from statecut.pruning.refit import (
    HELD_OUT,
    check_refit,
    check_varied,
    perplexity,
    refit,
    write_refitted,
)
from statecut.pruning.select import check_chooses_values, select, select_values
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import check_sliceable, slice_model, sliced_bytes
from statecut.pruning.statistics import ModelStatistics
from statecut.serving.engines import engine_named

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What `statecut prune` was asked for. How much to cut is said by one of `ratio`, `state`, or
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
    eps: Eps = "matched"  # of the output norm
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
        if request.refits:
            check_varied(
                checkpoint, torch.from_numpy(PackedTokens(packed, slice_name="calibration")[:])
            )
        if calibrates:
            data = PackedTokens(packed, slice_name="calibration")
            calibration = calibrate_on(data, request, values=cuts_values)
        selections = choose(request, ModelStatistics(checkpoint, calibration), splits)
        if request.state is None:
            logger.info("slicing: writing %s", request.out)
        if passthrough := checkpoint.passthrough:
            logger.info(
                "copied as they are: %d tensors beyond the text model (%s)",
                len(passthrough), ", ".join(checkpoint.architecture.passthrough),
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
                    eps=request.eps,
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
        lines += cautions(request, checkpoint, pruned.shape)
    return lines


def check_options(request: Request) -> None:
    """An error for what is wrong whatever the model."""
    method = method_named(request.method)
    method.check_target(request.target or method.targets[0])
    options = method.options(request.options)
    check_wanted(request)
    if request.state is not None or request.values is not None:
        check_chooses_values(method, options)
    check_counts(
        sequences=request.sequences,
        rows=request.sample_rows,
        batch=request.batch,
        round_to=request.round_to,
    )
    check_length(request.length)
    if request.text is not None:
        text_files(request.text)
    check_seed(request.seed)
    if request.engine is not None:
        engine_named(request.engine)


def check_length(length: int) -> None:
    if length < 2:
        raise InputError(
            f"--length {length}: must be 2 or more, as a token is predicted from those before it"
        )


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
    check_counts(keys=request.keys, values=request.values)
    for name, value in (("--keys", request.keys), ("--values", request.values)):
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
    if request.target is not None and all(split.width == full.width for split in splits):
        raise InputError(
            f"--target {request.target}: it says what key channels are judged by, and "
            f"{request.wanted} cuts values alone; leave it out"
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
    sources = models if text is None else [*models, text]
    check_not_overwriting(out, sources, kind="model", mark="config.json")
    check_output_path(out, force=force, folder=True)
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
        before = measure({"before": checkpoint}, packed, device=device, batch=batch)
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
                eps=request.eps,
            )
            sliced = Checkpoint(sliced_folder)
            began = time.monotonic()
            result = refit(sliced, checkpoint, ids, device=device, batch=batch)
            seconds = time.monotonic() - began
            write_refitted(sliced, result, refitted_folder)
            models = {"cut": sliced, "refitted": Checkpoint(refitted_folder)}
            held_out = measure(models, packed, device=device, batch=batch)
            held_out = replace(held_out, perplexities=before.perplexities | held_out.perplexities)
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
    logger.info("computing the perplexity: %s", ", ".join(models))
    values = {n: perplexity(c, ids, device=device, batch=batch) for n, c in models.items()}
    return HeldOut(values, ids.numel())
