"""What pruning did, as facts: lines for the screen, and rows of the model's card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from statecut.arguments import Eps
from statecut.arguments import width as width_of
from statecut.card import card, channels_cut, cut_before
from statecut.data.sources import Source
from statecut.evaluation.perplexity import HeldOut
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import MixerShape
from statecut.pruning.budget import in_words
from statecut.pruning.refit import Refit
from statecut.pruning.request import Request
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import eps_factor, sliced_sizes
from statecut.serving.engines import computed_wrong

NEAR = 1.02  # times the best perplexity
WITH_DIGESTS = ("base model digest", "calibration", "refitted to", "text of the refit")
"""Facts that the screen does not show."""


@dataclass(frozen=True)
class Candidate:
    """A cut that was refitted, and what the refit brought."""

    selection: Selection
    shape: MixerShape
    parameters: int
    result: Refit
    seconds: float
    text: Source
    held_out: HeldOut  # before, cut, refitted

    @property
    def perplexity(self) -> float:
        return self.held_out.perplexities["refitted"]

    def row(self) -> str:
        """Of the table of all candidates."""
        _, cut, refitted = self.held_out.perplexities.values()
        return (
            f"{self.shape.width:3}  {self.shape.value_width:3}  {self.shape.state_bytes():13,}  "
            f"{self.parameters:14,}  {cut:15.2f}  {refitted:9.2f}  {self.seconds:5.0f} s"
        )


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the lowest perplexity on text held out, the first of equals."""
    return min(candidates, key=lambda candidate: candidate.perplexity)


@dataclass(frozen=True)
class Outcome:
    """What was cut, and with a refit all cuts that were tried."""

    request: Request
    checkpoint: Checkpoint
    selection: Selection
    candidates: Sequence[Candidate] = ()

    @property
    def shape(self) -> MixerShape:
        return self.selection.cut(self.checkpoint.shape)

    def facts(self) -> dict[str, object]:
        request, checkpoint = self.request, self.checkpoint
        facts = pruned_facts(self.selection, request.ratio, checkpoint, request.eps)
        if request.state is not None:
            kept = self.shape.state_bytes() / checkpoint.shape.state_bytes()
            facts["recurrent state"] = (
                f"{facts['recurrent state']} ({request.state:g} asked, {kept:.3g} kept)"
            )
        if request.chosen_engine:
            facts["engine"] = request.chosen_engine.advice(self.shape)
        if passthrough := checkpoint.passthrough:
            prefixes = ", ".join(checkpoint.architecture.passthrough)
            facts["copied as they are"] = f"{len(passthrough)} tensors ({prefixes})"
        if self.candidates:
            chosen = best(self.candidates)
            facts |= refitted_facts(chosen.result, checkpoint)
            facts["text of the refit"] = f"{chosen.text.name} ({chosen.text.revision})"
            facts["seconds of the refit"] = f"{chosen.seconds:.0f}"
            facts["perplexity"] = chosen.held_out.fact()
        return facts

    def warnings(self) -> Iterator[str]:
        for side, tensors in sides(self.selection).items():
            if "log_volume" in tensors and (short := int(tensors["log_volume"].isneginf().sum())):
                yield (
                    f"in {short} of {tensors['log_volume'].numel()} heads the sampled rows have "
                    f"fewer independent {side} than are kept, and the rest was filled up by "
                    "number: give more --rows or --text"
                )
        if self.candidates:
            yield from self._warnings_of_the_refit()
        if not self.request.engine:
            kind, by_ratio = self.checkpoint.architecture, self.request.ratio is not None
            full = self.checkpoint.shape
            for line in computed_wrong(kind.model_type, self.shape, full, by_ratio=by_ratio):
                yield line.removeprefix("WARNING: ")

    def _warnings_of_the_refit(self) -> Iterator[str]:
        chosen = best(self.candidates)
        before, cut, refitted = chosen.held_out.perplexities.values()
        if refitted >= cut and cut <= before:
            yield "the cut did no damage to the text held out, and the refit made it worse"
        elif refitted >= cut:
            widths = f"--keys {chosen.shape.width} --values {chosen.shape.value_width} "
            yield (
                "the refit did not lower the perplexity of the text held out: give more "
                f"--sequences or --text, or {widths if self.request.state else ''}--no-refit"
            )
        near = [
            in_words(candidate.shape)
            for candidate in self.candidates
            if candidate is not chosen and candidate.perplexity < NEAR * chosen.perplexity
        ]
        if near:
            yield (
                f"within {NEAR - 1:.0%} of the best: {', '.join(near)}. Other text may choose "
                "otherwise: give more --sequences or --text"
            )

    def table(self) -> list[str]:
        """All cuts that were compared."""
        if self.request.state is None:
            return []
        chosen = best(self.candidates)
        return [
            f"d_k  d_v  {'state, bytes':>13}  {'parameters':>14}  {'perplexity: cut':>15}  "
            f"{'refitted':>9}  {'refit':>7}",
            *(c.row() + ("  written" if c is chosen else "") for c in self.candidates),
        ]

    def lines(self) -> list[str]:
        """For the screen."""
        facts = {name: fact for name, fact in self.facts().items() if name not in WITH_DIGESTS}
        width = max(map(len, facts))
        table = self.table()
        return [
            *(table and [*table, ""]),
            *(f"{name:{width}}  {fact}" for name, fact in facts.items()),
            *(f"WARNING: {warning}" for warning in self.warnings()),
        ]

    def card(self) -> str:
        """README.md of the model: what it is and how it was made."""
        request, checkpoint = self.request, self.checkpoint
        selections = (self.selection, *(c.selection for c in self.candidates))
        facts = {**cut_before(checkpoint.folder), **self.facts()}
        if warnings := "; ".join(self.warnings()):
            facts["warning"] = warnings
        fewer = "fewer key and query channels, pruned by Statecut."
        if self.selection.value_change():
            channels = "key, query and value" if self.selection.change() else "value"
            fewer = (
                f"fewer {channels} channels, pruned by Statecut. The norm in front of the output "
                "projection is over fewer channels, too, and its weight is folded into the "
                "projection."
            )
        return card(
            request.out.name,
            f"{request.model.name} with {fewer}",
            facts,
            table=self.table(),
            command=request.command(
                next((s.about["target"] for s in selections if s.change()), None)
            ),
            config=checkpoint.config,
            base=request.model.name,
        )


def pruned_facts(
    selection: Selection, ratio: float | None, base: Checkpoint, eps: Eps
) -> dict[str, object]:
    """Without a ratio the widths say what was cut."""
    about, full, cut = selection.about, base.shape, selection.cut(base.shape)
    facts: dict[str, object] = {"method": about.get("values", about)["method"]}
    if selection.change():
        facts["target"] = about["target"]
    if ratio is not None:  # the one that was cut differs if the width was rounded up
        rounded = cut.width != width_of(full.width, ratio)
        cut_ratio = f"{ratio} asked, {1 - cut.width / full.width:.3g} cut"
        facts["ratio"] = cut_ratio if rounded else ratio
    parameters = sum(header.numel() for _, header in base.headers())
    facts |= channels_cut(cut, full)
    facts["parameters"] = f"{parameters:,} -> {sliced_sizes(base, cut, None)[0]:,}"
    facts["recurrent state"] = f"{full.state_bytes():,} -> {cut.state_bytes():,} bytes"
    facts["output norm's eps"] = eps_in_words(base, cut, eps)
    for side, tensors in sides(selection).items():
        if "condition_before" in tensors:
            conditions = [tensors[f"condition_{w}"].median() for w in ("before", "after")]
            ranks = [tensors[f"effective_rank_{w}"].mean() for w in ("before", "after")]
            facts[f"condition of {side}"] = "{:.3g} -> {:.3g} (median of heads)".format(*conditions)
            facts[f"effective rank of {side}"] = "{:.3g} -> {:.3g} (mean of heads)".format(*ranks)
        if "swaps" in tensors:
            swaps = tensors["swaps"]
            facts[f"swaps of {side}"] = f"{int(swaps.sum())} in {swaps.numel()} heads"
    facts["base model digest"] = about["model_digest"]
    if calibration := about.get("calibration"):
        text = f"{calibration['text']['source']} ({calibration['text']['revision']})"
        tokens = f"{calibration['tokens']:,} tokens"
        facts["calibration"] = f"{tokens} of {text}, seed {calibration['seed']}"
    return facts


def sides(selection: Selection) -> dict[str, dict[str, Tensor]]:
    """What is known of the choice of keys, and of values, each if they were cut."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in selection.tensors.items():
        side = "values" if name.startswith("values.") else "keys"
        found.setdefault(side, {})[name.removeprefix("values.")] = tensor
    return found


def refitted_facts(result: Refit, teacher: Checkpoint) -> dict[str, object]:
    matrices = Counter(fit.name.split(".")[-2] for fit in result.fits)
    names = " and ".join(f"{name} of {count} layers" for name, count in matrices.items())
    error = sum(fit.error for fit in result.fits) / len(result.fits)
    return {
        "refitted": f"{names}, on {result.tokens:,} tokens",
        "error left": f"{error:.3f} of the sliced model's, in the stream behind them, in the mean",
        "refitted to": teacher.digest(),
    }


def eps_in_words(base: Checkpoint, cut: MixerShape, eps: Eps) -> str:
    """What a cut does to the eps of the output norm, and why."""
    kind, full = base.architecture, base.shape
    before = kind.eps(base.config)
    pairs = ((full.width, cut.width), (full.value_width, cut.value_width))
    factors = [f"{old}/{new}" for old, new in pairs if new < old]
    projection = ""
    if eps == "matched" and cut.value_width < full.value_width:
        projection = f", and the output projection times sqrt({factors[-1]})"
    if before is None:
        return f"as it was: no config of {kind.model_type} says it{projection}"
    if eps == "kept":
        return f"{before:g}, as it was"
    after = before * eps_factor(full, cut)
    why = f"times {' x '.join(factors)}{projection}: cut channels count as zeros"
    return f"{before:g} -> {after:.6g} ({why})"
