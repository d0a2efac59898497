"""Refit: what it brings for each method, ratio, draw of text and way of fitting, and its cost.

    python benchmarks/refit.py --gpu --models M1 M2 --corpora wikipedia=W novels=N --out rows.jsonl
    python benchmarks/refit.py --models M --corpora docs=T --sequences 16 --out rows.jsonl    CPU

Models are unpruned folders; corpora are folders of packed tokens (keycut.data.packing), with slices
`calibration` and `held_out`, or else without slices: then their last sequences are held out. Every
corpus in its turn is calibrated on (--calibrate-on: only these), and perplexity is computed on the
held-out text of all of them: unpruned, sliced and refitted. The ways of fitting are in WAYS.

A row of JSON per cell is written as soon as it is known; cells that are in the file already are
not computed again. With --seconds no cell is started after that time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import existing
from torch import Tensor

from keycut import refit as fitting
from keycut.calibration import Calibration, calibrate, calibration_dtype
from keycut.config import width as width_of
from keycut.data.packing import PackedTokens
from keycut.errors import InputError
from keycut.models.capture import mixers
from keycut.models.checkpoint import Checkpoint, load
from keycut.selection.methods import METHODS, method_named
from keycut.selection.select import select
from keycut.selection.statistics import ModelStatistics
from keycut.slicing import slice_model

Way = fitting._Way


@dataclass(frozen=True)
class Variant:
    """A way of fitting, and the text that it sees."""

    way: Callable[[Checkpoint], Way] = lambda student: Way()
    text: float = 1.0  # of --sequences
    others: float = 0.0  # share of the text that is from the other corpora
    ridge_elsewhere: bool = False  # the ridge is chosen on the other corpora
    steps: tuple[float, ...] = ()  # ratios on the way, each refitted and calibrated again
    by_gradient: bool = False  # rows weighted by the gradient of the loss that meets them


def ridge(*ridges: float, **given: Any) -> Callable[[Checkpoint], Way]:
    way = Way(solve=partial(fitting._ridge, ridges=ridges or fitting.RIDGES), **given)
    return lambda student: way


def drift(share: float, *ridges: float) -> Callable[[Checkpoint], Way]:
    return ridge(*ridges, target=partial(fitting._stream_difference, drift=share))


def heads(student: Checkpoint) -> Way:
    count = student.shape.value_heads
    return Way(solve=partial(fitting._heads_apart, heads=count), rule=True)


WAYS = {
    "chosen": Variant(),
    "fixed": Variant(ridge(1e-3)),
    "relative": Variant(ridge(row_weights=fitting._relative)),
    "gradient": Variant(by_gradient=True),
    "gradient_no_drift": Variant(drift(0.0), by_gradient=True),
    "relative_no_drift": Variant(
        ridge(row_weights=fitting._relative, target=partial(fitting._stream_difference, drift=0.0))
    ),
    "chosen_no_drift": Variant(drift(0.0)),
    "fixed_no_drift": Variant(drift(0.0, 1e-3)),
    "half_drift": Variant(drift(0.5)),
    "fixed_0.01": Variant(ridge(1e-2)),
    "fixed_0.1": Variant(ridge(1e-1)),
    "fixed_0.5": Variant(ridge(0.5)),
    "low_rank": Variant(lambda student: Way(solve=fitting._low_rank)),
    "heads": Variant(heads),
    "mixed_text": Variant(others=0.5),
    "mixed_relative": Variant(ridge(row_weights=fitting._relative), others=0.5),
    "ridge_elsewhere": Variant(
        lambda student: Way(solve=partial(fitting._ridge, also_held_out=False)),
        ridge_elsewhere=True,
    ),
    "quarter_text": Variant(text=0.25),
    "four_times_text": Variant(text=4.0),
    "down_proj": Variant(ridge(down_proj=True)),
    "relative_down_proj": Variant(ridge(row_weights=fitting._relative, down_proj=True)),
    "steps": Variant(steps=(0.5, 0.75)),
    "relative_steps": Variant(ridge(row_weights=fitting._relative), steps=(0.5, 0.75)),
}


@dataclass
class Bench:
    """What all cells have in common."""

    corpora: dict[str, tuple[PackedTokens, range, range]]  # calibration and held-out sequences
    device: str
    sequences: int  # of refit
    calibration: int  # sequences of the selection's
    batch: int
    folder: Path

    @property
    def dtype(self) -> torch.dtype | None:
        return calibration_dtype(self.device)

    def draw(self, corpus: str, count: int, seed: int) -> Tensor:
        """So many sequences for calibration; those of a larger count begin with these."""
        tokens, places, _ = self.corpora[corpus]
        if count > len(places):
            raise InputError(f"{corpus}: {count} sequences are asked for, it has {len(places)}")
        order = np.random.default_rng(seed).permutation(len(places))[:count]
        return torch.from_numpy(np.stack([tokens[places[i]] for i in order]))

    def perplexity(self, model: Any) -> dict[str, float]:
        result = {}
        for name, (tokens, _, places) in self.corpora.items():
            losses = []
            with torch.no_grad():
                for start in range(0, len(places), 8):
                    rows = tokens[places[start] : places[start] + len(places[start : start + 8])]
                    ids = torch.from_numpy(rows).to(self.device)
                    losses.append(model(ids, labels=ids, use_cache=False).loss * len(ids))
            result[name] = math.exp(torch.stack(losses).double().sum().item() / len(places))
        return result

    def calibrated(self, folder: Path, corpus: str, seed: int, gradients: bool) -> Calibration:
        ids = self.draw(corpus, self.calibration, seed)
        return calibrate(
            load(folder, device=self.device, dtype=self.dtype), ids.split(8), tokens=ids.numel(),
            seed=seed, gradients=gradients,
            provenance={"model_digest": Checkpoint(folder).digest(),
                        "text": {"source": corpus, "revision": ""}},
        )  # fmt: skip

    def slice(
        self, source: Checkpoint, calibration: Calibration, method: str, seed: int, width: int,
        name: str,
    ) -> Checkpoint:  # fmt: skip
        statistics = ModelStatistics(source, calibration)
        (selection,) = select(method, statistics, [width], target="kq", seed=seed)
        out = self.folder / name
        slice_model(source, selection.change(), out, dtype=self.dtype, force=True)
        return Checkpoint(out)

    def texts(self, corpus: str, variant: Variant, seed: int) -> tuple[Tensor, Tensor]:
        """What is fitted on, and what chooses the ridge."""
        count = round(self.sequences * variant.text)
        others = [name for name in self.corpora if name != corpus]
        borrowed = round(count * variant.others / max(1, len(others)))
        if (variant.others or variant.ridge_elsewhere) and not others:
            raise InputError("needs two corpora")
        drawn = [self.draw(corpus, count - borrowed * len(others), seed)]
        if borrowed:
            drawn += [self.draw(name, borrowed, seed) for name in others]
        held = [torch.arange(len(ids)) % fitting.HELD_OUT == 0 for ids in drawn]
        most = torch.cat([ids[~h] for ids, h in zip(drawn, held, strict=True)])
        rest = torch.cat([ids[h] for ids, h in zip(drawn, held, strict=True)])
        if variant.ridge_elsewhere:
            return drawn[0], torch.cat([self.draw(name, count // 8, seed) for name in others])
        return most, rest

    def fit(
        self, student: Checkpoint, teacher: Checkpoint, corpus: str, variant: Variant, seed: int
    ) -> fitting.Refit:
        most, rest = self.texts(corpus, variant, seed)
        # A few held-out sequences of each corpus: do the layers' errors fall there, too?
        elsewhere = [
            torch.from_numpy(tokens[places[0] : places[0] + min(8, len(places))])
            for tokens, _, places in self.corpora.values()
        ]
        way = variant.way(student)
        if variant.by_gradient:
            batches = [ids for text in (most, rest, *elsewhere) for ids in text.split(self.batch)]
            norms = self.gradient_norms(teacher, batches)
            way = replace(way, row_weights=lambda _, layer, batch: norms[batch][layer])
        return fitting._refit(
            student, teacher, most, rest, device=self.device, batch=self.batch, way=way,
            elsewhere=elsewhere,
        )  # fmt: skip

    def gradient_norms(self, teacher: Checkpoint, batches: list[Tensor]) -> list[list[Tensor]]:
        """For each batch and layer, (B, T, 1): how much a change of the residual stream behind the
        mixer matters to the loss of the unpruned model, 1 in the mean."""
        model = load(teacher.folder, device=self.device, dtype=self.dtype).requires_grad_(False)
        _, _, layers = mixers(model)
        norms: dict[int, Tensor] = {}

        def watch(layer: int) -> Callable[..., None]:
            def keep(gradient: Tensor) -> None:
                norms[layer] = gradient.float().norm(dim=-1, keepdim=True)

            return lambda module, args, output: output.register_hook(keep) and None

        for layer, mixer in enumerate(layers):
            mixer.o_proj.register_forward_hook(watch(layer))
        result = []
        for ids in batches:
            parts = []
            for some in ids.to(self.device).split(8):
                embedded = model.get_input_embeddings()(some).requires_grad_()
                model(inputs_embeds=embedded, labels=some, use_cache=False).loss.backward()
                parts.append([norms[layer] / norms[layer].mean() for layer in range(len(layers))])
            result.append([torch.cat(of_layer) for of_layer in zip(*parts, strict=True)])
        return result

    def stepwise(
        self, teacher: Checkpoint, corpus: str, method: str, ratio: float, seed: int,
        variant: Variant,
    ) -> Checkpoint:  # fmt: skip
        """Cut in several steps, each refitted before the next is chosen."""
        current = teacher
        gradients = "gradients" in METHODS[method].needs
        for step in [*(s for s in variant.steps if s < ratio), ratio]:
            calibration = self.calibrated(current.folder, corpus, seed, gradients)
            width = width_of(teacher.shape.width, step)
            current = self.slice(current, calibration, method, seed, width, f"step-{step}")
            if step < ratio:
                result = self.fit(current, teacher, corpus, variant, seed)
                out = self.folder / f"step-{step}-refitted"
                fitting.write_refitted(current, result, out, force=True)
                current = Checkpoint(out)
        return current

    def clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        if self.device == "cuda":
            return round(torch.cuda.max_memory_allocated() / 2**20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def cells(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict]:
    """A row for each cell that is not done, in the order of the arguments; seeds are outermost."""
    gradients = any("gradients" in METHODS[method].needs for method in options.methods)
    bases: dict[str, dict[str, float]] = {}
    for seed, corpus, folder in itertools.product(options.seeds, options.calibrate, options.models):
        teacher = Checkpoint(folder)
        calibration = None
        for ratio, method in itertools.product(options.ratios, options.methods):
            key = (folder.name, corpus, method, ratio, seed)
            ways = [way for way in options.ways if (*key, way) not in done]
            if not ways:
                continue
            if calibration is None:
                calibration = bench.calibrated(folder, corpus, seed, gradients)
            if folder.name not in bases:
                bases[folder.name] = bench.perplexity(
                    load(folder, device=bench.device, dtype=bench.dtype)
                )
            width = width_of(teacher.shape.width, ratio)
            student = bench.slice(teacher, calibration, method, seed, width, "sliced")
            model = load(student.folder, device=bench.device, dtype=bench.dtype)
            sliced = bench.perplexity(model)
            for way in ways:
                yield {
                    **dict(zip(("model", "corpus", "method", "ratio", "seed"), key, strict=True)),
                    "way": way,
                    **cell(bench, teacher, student, model, corpus, method, ratio, seed, way),
                    "sequences": bench.sequences,
                    "calibration": bench.calibration,
                    "held_out": options.held_out,
                    "unpruned": bases[folder.name],
                    "sliced": sliced,
                }


def cell(
    bench: Bench, teacher: Checkpoint, student: Checkpoint, model: Any, corpus: str, method: str,
    ratio: float, seed: int, way: str,
) -> dict[str, Any]:  # fmt: skip
    """`model` is the loaded student; its refitted weights are put in and taken out again."""
    variant = WAYS[way]
    if variant.steps:
        student = bench.stepwise(teacher, corpus, method, ratio, seed, variant)
        model = load(student.folder, device=bench.device, dtype=bench.dtype)
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = bench.clock()
    result = bench.fit(student, teacher, corpus, variant, seed)
    seconds = bench.clock() - start
    peak = bench.peak()
    before = {name: model.get_parameter(name).detach().clone() for name in result.weights}
    model.load_state_dict(result.weights, strict=False)
    refitted = bench.perplexity(model)
    model.load_state_dict(before, strict=False)
    return {
        "width": student.shape.width,
        "tokens": result.tokens,
        "refitted": refitted,
        "seconds": round(seconds, 2),
        "peak_MiB": peak,
        "layers": [
            {
                "ridge": str(fit.ridge),
                "damage": round(fit.damage, 5),
                "error": round(fit.error, 4),
                "held_out": round(fit.held_out, 4),
                "elsewhere": [round(value, 4) for value in fit.elsewhere],
            }
            for fit in result.layers
        ],
    }


def line(row: dict[str, Any]) -> str:
    """For people: sliced to refitted, and the share of the damage that is gone."""
    texts = []
    for name, refitted in row["refitted"].items():
        sliced, whole = row["sliced"][name], row["unpruned"][name]
        gone = (sliced - refitted) / (sliced - whole)
        mark = "*" if name == row["corpus"] else ""
        texts.append(f"{name}{mark} {whole:.1f} {sliced:.1f} -> {refitted:.1f} ({gone:.0%})")
    return (
        f"{row['model']} {row['method']} {row['ratio']} seed {row['seed']} {row['way']}: "
        f"{'; '.join(texts)}; {row['seconds']} s, {row['peak_MiB']} MiB"
    )


def named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    return name, existing(folder)


def opened(folder: Path, held_out: int) -> tuple[PackedTokens, range, range]:
    tokens = PackedTokens(folder)
    slices = tokens.manifest.slices
    if {"calibration", "held_out"} <= slices.keys():
        parts = range(*slices["calibration"]), range(*slices["held_out"])[:held_out]
    else:
        parts = range(len(tokens) - held_out), range(len(tokens))[-held_out:]
    if not all(parts):
        raise InputError(f"{folder}: {len(tokens)} sequences, {held_out} of them held out")
    return tokens, *parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=existing, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--corpora", type=named, nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--calibrate-on", nargs="+", metavar="NAME", help="all corpora if absent")
    parser.add_argument("--methods", nargs="+", default=["drrqr", "fisher", "grad", "l1"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.5, 0.875])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY",
                        help=", ".join(WAYS))  # fmt: skip
    parser.add_argument("--sequences", type=int, default=256, help="that refit sees")
    parser.add_argument("--calibration", type=int, default=128, help="that the selection sees")
    parser.add_argument("--held-out", type=int, default=64, help="sequences of each corpus")
    parser.add_argument("--batch", type=int, default=32, help="sequences at a time in refit")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.gpu and not torch.cuda.is_available():
        parser.error(f"--gpu: torch {torch.__version__} finds no GPU here")
    for method in options.methods:
        method_named(method)
    corpora = {name: opened(folder, options.held_out) for name, folder in options.corpora}
    options.calibrate = options.calibrate_on or list(corpora)
    if unknown := set(options.calibrate) - set(corpora):
        parser.error(f"--calibrate-on {' '.join(sorted(unknown))}: no such corpus")
    logging.getLogger("keycut.refit").setLevel(logging.WARNING)
    done = set()
    if options.out.exists():
        rows = map(json.loads, options.out.read_text().splitlines())
        sizes = {"sequences": options.sequences, "calibration": options.calibration,
                 "held_out": options.held_out}  # fmt: skip
        keys = ("model", "corpus", "method", "ratio", "seed", "way")
        done = {tuple(row[key] for key in keys) for row in rows if sizes.items() <= row.items()}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        bench = Bench(
            corpora, "cuda" if options.gpu else "cpu", options.sequences, options.calibration,
            options.batch, Path(folder),
        )  # fmt: skip
        for way, corpus in itertools.product(options.ways, options.calibrate):
            try:
                bench.texts(corpus, WAYS[way], options.seeds[0])
            except InputError as error:
                parser.error(f"--ways {way}: {error}")
        for row in cells(bench, options, done):
            print(json.dumps(row), file=out, flush=True)
            print(f"{time.monotonic() - start:.0f} s  {line(row)}", flush=True)
            if time.monotonic() - start > options.seconds:
                sys.exit(f"stopped after {options.seconds:g} s; start again for the rest")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
