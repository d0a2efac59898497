"""The whole method on one model: calibrate, select, slice, and report what changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch

from keycut.artefact import (
    check_disk_space,
    check_not_overwriting,
    check_output_path,
    explain_full_disk,
)
from keycut.calibration import Calibration, calibrate_folder
from keycut.config import width as width_of
from keycut.config.section import check_seed
from keycut.errors import InputError
from keycut.models.card import card, pruned_facts
from keycut.models.checkpoint import Checkpoint
from keycut.selection.method import Target
from keycut.selection.methods import METHODS, method_named
from keycut.selection.select import select
from keycut.selection.selection import Selection
from keycut.selection.statistics import ModelStatistics
from keycut.slicing import slice_model, sliced_bytes

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
    dtype: torch.dtype | None = None  # the model's own
    device: str = "cpu"
    force: bool = False


def prune(request: Request) -> list[str]:
    """Write the pruned model to `request.out`. What changed, in lines."""
    method = method_named(request.method)
    target = request.target or method.targets[0]
    method.check_target(target)
    method.options(request.options)
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
    checkpoint = Checkpoint(request.model)
    full = checkpoint.shape.width
    width = kept_width(full, request.ratio, request.round_to)
    if width == full and request.ratio > 0:
        raise InputError(
            f"--round-to {request.round_to} leaves all {full} channels of a head at ratio "
            f"{request.ratio}: round to less, or cut more"
        )
    check_output_path(request.out, force=request.force)
    sources = [request.model] if request.text is None else [request.model, request.text]
    check_not_overwriting(request.out, sources, kind="model", mark="config.json")
    if request.model.resolve() in request.out.resolve().parents:
        raise InputError(f"{request.out}: lies in the model's own folder; give one outside of it")
    dtype = written_dtype(request, checkpoint)
    check_disk_space(request.out, sliced_bytes(checkpoint, width, dtype))

    calibration = None
    if "text" in method.needs or request.text is not None:
        checkpoint.check_no_softmax()
        with explain_full_disk(gettempdir()):
            calibration = calibrate_on_text(request, checkpoint)
    logger.info("selecting: %s keeps %d of %d channels a head", request.method, width, full)
    model = ModelStatistics(checkpoint, calibration)
    (selection,) = select(
        request.method, model, [width], target=target, seed=request.seed, **request.options
    )
    logger.info("slicing: writing %s", request.out)
    if dtype != request.dtype:
        logger.info(
            "written as bfloat16: DeltaNet's kernel refuses float32 (--dtype float32 keeps it)"
        )
    with explain_full_disk(request.out):
        slice_model(
            checkpoint,
            selection.change(),
            request.out,
            dtype=dtype,
            card=pruned_card(request, checkpoint, selection),
            force=request.force,
        )
    return summary(checkpoint, Checkpoint(request.out), selection)


def kept_width(full: int, ratio: float, round_to: int) -> int:
    """floor(d_k (1 - ratio)), then up to a multiple of `round_to`, but never above d_k."""
    width = width_of(full, ratio)
    return min(full, -(-width // round_to) * round_to)


def written_dtype(request: Request, checkpoint: Checkpoint) -> torch.dtype | None:
    """What the weights become, or None if each keeps its own: float32 where a kernel takes it."""
    if request.dtype is None and not checkpoint.architecture.float32:
        dtypes = {tensor.dtype for _, tensor in checkpoint.tensors() if tensor.is_floating_point()}
        if dtypes - {torch.bfloat16, torch.float16}:
            return torch.bfloat16
    return request.dtype


def calibrate_on_text(request: Request, checkpoint: Checkpoint) -> Calibration:
    from keycut.data.documentation import documentation, documentation_source
    from keycut.data.packing import PackedTokens, pack
    from keycut.data.sources import describe, read
    from keycut.data.tokenizer import check_vocabulary, load_tokenizer

    tokenizer = load_tokenizer(request.model)
    check_vocabulary(tokenizer, checkpoint.config["vocab_size"])
    if request.text is None:
        logger.info(
            "calibrating on the prose of the installed Python packages: give --text for your own"
        )
        documents: Iterable[str] = documentation()
        source = documentation_source()
    else:
        documents = read(request.text, seed=request.seed)
        source = describe(request.text)
    with TemporaryDirectory() as folder:
        pack(
            documents,
            tokenizer,
            Path(folder) / "text",
            sequence_length=request.length,
            sequences=request.sequences,
            source=source,
            seed=request.seed,
        )
        # After the text: too little of it is an error at once.
        device = "the GPU" if request.device == "cuda" else "the CPU"
        logger.info("loading %s on %s", request.model, device)
        return calibrate_folder(
            request.model,
            PackedTokens(Path(folder) / "text"),
            name=source.name,
            sequences=request.sequences,
            rows=request.sample_rows,
            seed=request.seed,
            device=request.device,
            batch=request.batch,
            gradients="gradients" in METHODS[request.method].needs,
        )


def summary(before: Checkpoint, after: Checkpoint, selection: Selection) -> list[str]:
    """What changed, in lines."""
    counts = [sum(t.numel() for _, t in c.tensors()) for c in (before, after)]
    states = [c.shape.state_bytes() for c in (before, after)]
    lines = [
        f"key channels a head  {before.shape.width} -> {after.shape.width}",
        f"parameters           {counts[0]:,} -> {counts[1]:,}",
        f"state of a sequence  {states[0]:,} -> {states[1]:,} bytes",
    ]
    if "condition_before" in selection.tensors:
        conditions = [selection.tensors[f"condition_{w}"].median() for w in ("before", "after")]
        ranks = [selection.tensors[f"effective_rank_{w}"].mean() for w in ("before", "after")]
        lines += [
            f"condition of keys    {conditions[0]:.3g} -> {conditions[1]:.3g} (median of heads)",
            f"their effective rank {ranks[0]:.3g} -> {ranks[1]:.3g} (mean of heads)",
        ]
    else:
        lines.append(f"condition of keys    not known: {selection.about['method']} needs no text")
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


def pruned_card(request: Request, checkpoint: Checkpoint, selection: Selection) -> str:
    """README.md of the model: what it is and how it was made."""
    options = (
        f"--method {request.method} --ratio {request.ratio} --target {selection.about['target']} "
        f"--seed {request.seed} --round-to {request.round_to} --sequences {request.sequences} "
        f"--length {request.length} --rows {request.sample_rows}"
        + "".join(f" {o.flag} {selection.about[o.name]}" for o in METHODS[request.method].takes)
        + (f" --dtype {str(request.dtype).removeprefix('torch.')}" if request.dtype else "")
        + (f" --text {request.text.name}" if request.text else "")
    )
    return card(
        request.out.name,
        f"{request.model.name} with fewer key and query channels, pruned by Keycut.",
        pruned_facts(selection, request.ratio),
        command=f"keycut prune {request.model.name} {request.out.name} {options}",
        config=checkpoint.config,
        base=request.model.name,
    )
