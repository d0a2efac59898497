"""What pruning and recovery did, in lines for the screen and in the model's card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from statecut.card import (
    card,
    cut_before,
    eps_in_words,
    pruned_facts,
    ratio_in_words,
    refitted_facts,
)
from statecut.data.sources import Source
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import MixerShape
from statecut.pruning.budget import Split
from statecut.pruning.methods import METHODS
from statecut.pruning.refit import Refit
from statecut.pruning.selection import Selection
from statecut.serving.engines import computed_wrong, engine_named

if TYPE_CHECKING:
    import torch

    from statecut.pruning.prune import Request

NEAR = 1.02  # times the best perplexity


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
        before, cut, refitted = self.held_out.perplexities.values()
        if refitted < cut:
            return ""
        if cut <= before:
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
        f"output norm's eps    {eps_in_words(before, after.shape, request.eps)}",
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
    candidates = comparison.candidates if comparison else ()
    cuts_keys = any(s.change() for s in (selection, *(c.selection for c in candidates)))
    options = (
        f"--method {request.method} {request.wanted} "
        + (f"--target {request.target or method.targets[0]} " if cuts_keys else "")
        + f"--seed {request.seed} --sequences {request.sequences} "
        f"--length {request.length} --rows {request.sample_rows} "
        f"--{'' if request.refits else 'no-'}refit --eps {request.eps}"
        + "".join(f" {option.flag} {values[option.name]}" for option in method.takes)
        + (f" --round-to {request.round_to}" if request.round_to else "")
        + (f" --for {request.engine}" if request.engine else "")
        + (f" --dtype {str(request.dtype).removeprefix('torch.')}" if request.dtype else "")
        + (f" --text {request.text.name}" if request.text else "")
    )
    facts = cut_before(checkpoint.folder) | pruned_facts(
        selection, request.ratio, checkpoint, request.eps
    )
    shape = selection.cut(checkpoint.shape)
    table: list[str] = []
    if request.state is not None and comparison:
        facts["state"] = state_in_words(request.state, checkpoint.shape, shape)
        table = comparison.lines()
    if request.engine:
        facts["engine"] = engine_named(request.engine).advice(shape)
    elif wrong := list(cautions(request, checkpoint, shape)):
        facts["caution"] = "; ".join(line.removeprefix("CAUTION: ") for line in wrong)
    if passthrough := checkpoint.passthrough:
        names = ", ".join(checkpoint.architecture.passthrough)
        facts["beyond the text model"] = (
            f"{len(passthrough)} tensors ({names}), as they were in the base model"
        )
    if comparison:
        facts |= comparison.best.refitting.facts(checkpoint)
    return card(
        request.out.name,
        f"{request.model.name} with {what_is_fewer(selection)}",
        facts,
        table=table,
        command=f"statecut prune {request.model.name} {request.out.name} {options}",
        config=checkpoint.config,
        base=request.model.name,
    )


def cautions(request: Request, checkpoint: Checkpoint, cut: MixerShape) -> Iterator[str]:
    """Engines that compute the cut model wrong without an error."""
    model_type, by_ratio = checkpoint.architecture.model_type, request.ratio is not None
    return computed_wrong(model_type, cut, checkpoint.shape, by_ratio=by_ratio)


def what_is_fewer(selection: Selection) -> str:
    """The first sentence of a card, and what to know of cut values."""
    if not selection.value_change():
        return "fewer key and query channels, pruned by Statecut."
    channels = "key, query and value" if selection.change() else "value"
    return (
        f"fewer {channels} channels, pruned by Statecut. The norm in front of the output "
        "projection is over fewer channels, too, and its weight is folded into the projection."
    )
