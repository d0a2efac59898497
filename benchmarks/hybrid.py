"""A hybrid with the shapes of a 4B model: calibration and decoding, seconds and memory.

    python benchmarks/hybrid.py --out rows.jsonl                               on one GPU
    python benchmarks/hybrid.py --out rows.jsonl --parts decode --widths 128 64
    python benchmarks/hybrid.py --out rows.jsonl --tiny                        a tiny one, on a CPU
    python benchmarks/hybrid.py --table rows.jsonl                             as in docs/hybrids.md

The model is Qwen3.5's text model with random weights in bf16 and the sizes of Qwen3.5-4B (SHAPES):
24 layers with a delta rule, 8 with softmax attention. Parts, each in a process of its own:

    layerwise   calibration layer by layer, as methods without gradients and refit use it; the model
                is written to a folder first, which is not in the seconds
    decode      for each width, the model created at that d_k: bytes of its cache, tokens/s of
                greedy decoding behind a prompt, and how many sequences fit
    gradients   calibration with gradients, the whole model on the GPU; the batch is halved until
                it fits
    refit       least squares after cutting d_k in half; not among the default parts: minutes

Ways of decoding: `generate` is transformers' own cache, as `model.generate` uses it: Python
launches every kernel, and softmax layers copy their cache to append a token. `step` and `graph` are
one token at the same place again and again, with the softmax cache allocated in advance, launched
by Python or as a CUDA graph: what the kernels take. All start from the cache behind one random
prompt, repeated for every sequence.

A row of JSON is written as soon as it is known. A cell that fails is a row with its error. Parts
that are in the file already, whole and without an error, are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arguments import existing
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from reproduction.benchmarking.decoding import largest, many_first, why_not
from reproduction.benchmarking.passes import random_tokens
from reproduction.benchmarking.timing import (
    free,
    memory_for,
    out_of_memory,
    peak_bytes,
    time_runs,
)
from reproduction.generation import GreedyGeneration
from statecut import logs
from statecut.models import create, save
from statecut.models.architectures import architecture
from statecut.models.checkpoint import Checkpoint
from statecut.preflight import machine, relative_error, used_dtype
from statecut.process import FIXED, NotMeasured, in_one_line
from statecut.pruning.calibration import calibrate, calibrate_layerwise
from statecut.pruning.refit import refit
from statecut.pruning.slicing import Keep, slice_model

SHAPES: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560,
    "intermediate_size": 9216, "num_hidden_layers": 32, "tie_word_embeddings": True,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
TINY_SHAPES: dict[str, Any] = {
    **SHAPES, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
DEFAULTS = {
    "widths": [128, 96, 64, 32], "batches": [1, 32, 256], "prompt": 512, "contexts": [512, 4096],
    "tokens": 16, "sequences": 128, "length": 2048, "batch": 8,
}  # fmt: skip
TINY = {
    "widths": [32, 16], "batches": [1, 4], "prompt": 12, "contexts": [], "tokens": 3,
    "sequences": 8, "length": 64, "batch": 4,
}  # fmt: skip
PARTS = ("layerwise", "decode", "gradients", "refit")
WEIGHTS = {"layerwise": 2, "decode": 1, "gradients": 2, "refit": 4}  # shares of the time
WAYS = ("generate", "step", "graph")
FAILED = 3  # the exit code of a job that has written why
REPORTED_TOKENS = 4096  # where the computed cache of a sequence is reported
FEW, MANY = 16, 64  # sequences, from which a first guess is made
GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What runs in a process of its own."""

    part: str
    width: int | None = None

    def name(self) -> str:
        return self.part if self.width is None else f"{self.part}:{self.width}"

    def row(self) -> Row:
        return {"part": self.part} if self.width is None else {"part": "decode", "d_k": self.width}

    @classmethod
    def named(cls, name: str) -> Job:
        part, _, width = name.partition(":")
        return cls(part, int(width) if width else None)


@dataclass(frozen=True)
class Bench:
    """What all parts have in common."""

    options: argparse.Namespace
    device: str

    @property
    def shapes(self) -> Row:
        return TINY_SHAPES if self.options.tiny else SHAPES

    @property
    def folder(self) -> Path:
        return self.options.folder / "model"

    def config(self, width: int) -> Row:
        return architecture(self.shapes).resized(self.shapes, width)

    def model(self, width: int | None = None) -> Any:
        config = self.config(width or self.shapes["linear_key_head_dim"])
        with torch.device(self.device):
            model = create(config, seed=0, dtype=used_dtype(self.device)).eval()
        free()
        return model

    def text(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        size = (self.options.sequences, self.options.length)
        return torch.randint(self.shapes["vocab_size"], size, generator=generator)

    def timed(self, work: Callable[[], object]) -> Row:
        """Seconds and peak memory of calibration or refit."""
        free()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        work()  # ends with results on the CPU
        seconds = time.perf_counter() - start
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tokens = self.options.sequences * self.options.length
        return {
            "sequences": self.options.sequences, "length": self.options.length,
            "seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds),
            "peak_gib": round(peak / GIB, 2),
        }  # fmt: skip


def cell(row: Row, measure: Callable[[], Row]) -> Row:
    """A row with its figures, or with the reason why there are none."""
    try:
        return {**row, **measure()}
    except Exception as error:  # whatever it is, the other cells go on
        return {**row, "error": in_one_line(error)}
    finally:
        free()


# Calibration


def layerwise(bench: Bench, job: Job) -> Iterator[Row]:
    batches = list(bench.text().split(bench.options.batch))
    model = bench.model()
    with torch.no_grad():
        model(batches[0].to(bench.device), use_cache=False)  # tunes the kernels
    start = time.perf_counter()
    save(model, bench.folder)
    del model
    about = {"batch": bench.options.batch, "write_seconds": round(time.perf_counter() - start, 1)}
    dtype = used_dtype(bench.device)
    work = partial(
        calibrate_layerwise, Checkpoint(bench.folder), batches, device=bench.device, dtype=dtype
    )
    yield cell({**job.row(), **about}, partial(bench.timed, work))


def gradients(bench: Bench, job: Job) -> Iterator[Row]:
    model, text, batch = bench.model(), bench.text(), bench.options.batch
    while not fits(model, text[:batch]) and batch > 1:
        batch //= 2
    work = partial(calibrate, model, text.split(batch))
    yield cell({**job.row(), "batch": batch}, partial(bench.timed, work))


def fits(model: Any, ids: Tensor) -> bool:
    """Whether a batch can be calibrated with gradients; tunes the kernels."""
    try:
        calibrate(model, [ids])
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    finally:
        free()
    return True


def refitted(bench: Bench, job: Job) -> Iterator[Row]:
    if not bench.folder.exists():
        save(bench.model(), bench.folder)
        free()
    teacher = Checkpoint(bench.folder)
    shape = teacher.shape
    width = shape.width // 2
    kept = torch.arange(width).expand(len(shape.layers), shape.heads, width)
    slice_model(teacher, Keep(kept), bench.options.folder / "sliced", force=True)
    student = Checkpoint(bench.options.folder / "sliced")
    work = partial(
        refit, student, teacher, bench.text(), device=bench.device, batch=bench.options.batch
    )
    row = {**job.row(), "d_k": width, "batch": bench.options.batch}
    yield cell(row, partial(bench.timed, work))


# Decoding


class Prompt:
    """The cache behind one random sequence, and the token that comes next."""

    @torch.inference_mode()
    def __init__(self, model: Any, tokens: int):
        out = model(random_tokens(model, 1, tokens), use_cache=True, logits_to_keep=1)
        self.tokens, self.cache = tokens, out.past_key_values
        self.last = out.logits.argmax(-1)

    def sizes(self) -> Row:
        """Bytes by what they are of."""
        sizes = {"recurrent": 0, "filters": 0, "softmax": 0}
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer):
                sizes["softmax"] += layer.keys.nbytes + layer.values.nbytes
            else:
                sizes["recurrent"] += layer.recurrent_states[0].nbytes
                sizes["filters"] += layer.conv_states[0].nbytes
        return sizes


class LastPlace(DynamicLayer):
    """The cache of a softmax layer with room for one more token, which every step writes."""

    def __init__(self, layer: DynamicLayer, batch: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (
            F.pad(part, (0, 0, 0, 1)).repeat(batch, 1, 1, 1) for part in (layer.keys, layer.values)
        )

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -1:].copy_(key)
        self.values[:, :, -1:].copy_(value)
        return self.keys, self.values


def repeated(model: Any, prompt: Prompt, batch: int, *, in_place: bool) -> Cache:
    """The prompt's cache for a batch of sequences."""
    cache = DynamicCache(config=model.config)
    for index, (layer, of_prompt) in enumerate(zip(cache.layers, prompt.cache.layers, strict=True)):
        if not isinstance(of_prompt, DynamicLayer):
            layer.update_conv_state(of_prompt.conv_states[0].repeat(batch, 1, 1))
            layer.update_recurrent_state(of_prompt.recurrent_states[0].repeat(batch, 1, 1, 1))
        elif in_place:
            cache.layers[index] = LastPlace(of_prompt, batch)
        else:
            parts = (of_prompt.keys, of_prompt.values)
            layer.update(*(part.repeat(batch, 1, 1, 1) for part in parts))
    return cache


@torch.inference_mode()
def greedy_generation(model: Any, prompt: Prompt, batch: int) -> GreedyGeneration:
    cache = repeated(model, prompt, batch, in_place=False)
    return GreedyGeneration(model, cache, prompt.last.repeat(batch, 1))


class Step:
    """One token of a batch of sequences, always at the place behind the prompt."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompt: Prompt, batch: int):
        self.model, self.prompt = model, prompt
        self.cache = repeated(model, prompt, batch, in_place=True)
        self.last = prompt.last.repeat(batch, 1)
        self.position = torch.full_like(self.last, prompt.tokens)

    @torch.inference_mode()
    def run(self) -> None:
        nothing_masked = {"full_attention": None, "linear_attention": None}
        out = self.model.model(
            self.last, past_key_values=self.cache, use_cache=True, position_ids=self.position,
            attention_mask=nothing_masked,
        )  # fmt: skip
        self.last.copy_(self.model.lm_head(out.last_hidden_state).argmax(-1))

    @torch.inference_mode()
    def reset(self) -> None:
        """Back to the state behind the prompt."""
        self.last.copy_(self.prompt.last.expand_as(self.last))
        for layer, of_prompt in zip(self.cache.layers, self.prompt.cache.layers, strict=True):
            if not isinstance(layer, DynamicLayer):
                layer.conv_states[0].copy_(of_prompt.conv_states[0].expand_as(layer.conv_states[0]))
                states = layer.recurrent_states[0]
                states.copy_(of_prompt.recurrent_states[0].expand_as(states))

    @torch.inference_mode()
    def captured(self) -> Callable[[], None]:
        """As a CUDA graph; it has been run before, so that all kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph.replay

    @torch.inference_mode()
    def check(self, run: Callable[[], object], expected: Sequence[Tensor]) -> None:
        """One step from the prompt changes the last layers' caches as `generate` does."""
        self.reset()
        run()
        for change, right in zip(changes(self.cache, self.prompt), expected, strict=True):
            if not (error := relative_error(change, right)) < 0.1:  # nothing but rounding
                raise NotMeasured(f"the cache changes otherwise than by `generate`, by {error:.2g}")


def changes(cache: Cache, prompt: Prompt) -> list[Tensor]:
    """What the first token behind a prompt adds to the state and to the softmax cache of the last
    layers that have one."""
    pairs = list(zip(cache.layers, prompt.cache.layers, strict=True))
    keys = [layer.keys[:, :, -1] for layer, _ in pairs if isinstance(layer, DynamicLayer)]
    states = [
        (layer.recurrent_states[0], of_prompt.recurrent_states[0])
        for layer, of_prompt in pairs
        if not isinstance(layer, DynamicLayer)
    ]
    state, before = states[-1]
    return [state - before, keys[-1].clone()]


def decode(bench: Bench, job: Job) -> Iterator[Row]:
    assert job.width is not None
    options, model = bench.options, bench.model(job.width)
    prompt = Prompt(model, options.prompt)
    yield cell(job.row(), partial(cache_sizes, bench, model, prompt, job.width))
    for batch in many_first(options.batches):
        row = {**job.row(), "prompt": options.prompt, "batch": batch}
        expected: list[Tensor] = []  # filled by `generate`, where that fits
        for way in (
            ("generate", "step", "graph") if bench.device == "cuda" else ("generate", "step")
        ):
            time_way = generate_speed if way == "generate" else partial(step_speed, way=way)
            yield cell(
                {**row, "way": way}, partial(time_way, bench, model, prompt, batch, expected)
            )
    del prompt
    for context in options.contexts:
        yield cell({**job.row(), "context": context}, partial(most, bench, model, context))


def cache_sizes(bench: Bench, model: Any, prompt: Prompt, width: int) -> Row:
    """Bytes of one sequence: those computed by Statecut, and those measured behind the prompt."""
    kind = architecture(bench.shapes)
    cache = kind.cache(bench.config(width))
    computed = {
        "recurrent": cache.shape.state_bytes(),
        "filters": cache.filter_bytes(),
        "softmax": cache.softmax_bytes(prompt.tokens),
    }
    measured = prompt.sizes()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
        "prompt": prompt.tokens,
        "computed_bytes": computed,
        "measured_bytes": measured,
        "recurrent_agrees": measured["recurrent"] == computed["recurrent"],
        f"computed_bytes_at_{REPORTED_TOKENS}": {
            **computed, "softmax": cache.softmax_bytes(REPORTED_TOKENS),
        },
    }  # fmt: skip


def speed(bench: Bench, run: Callable[[], object], batch: int, tokens: int, repeats: int) -> Row:
    runs = time_runs(run, bench.device, warmup=1, repeats=repeats, seconds=bench.options.each)
    return {
        "tokens_per_s": round(batch * tokens / runs.median, 1),
        "ms_per_token": round(1e3 * runs.median / tokens, 3),
        "quartiles_ms": [round(1e3 * value / tokens, 3) for value in (runs.lower, runs.upper)],
        "repeats": runs.repeats,
    }


def generate_speed(
    bench: Bench, model: Any, prompt: Prompt, batch: int, expected: list[Tensor]
) -> Row:
    with memory_for(batch):
        generation = greedy_generation(model, prompt, batch)
        generation.run(1)
        expected += changes(generation.state, prompt)
        tokens = bench.options.tokens
        return speed(bench, partial(generation.run, tokens), batch, tokens, repeats=3)


def step_speed(
    bench: Bench, model: Any, prompt: Prompt, batch: int, expected: list[Tensor], way: str
) -> Row:
    with memory_for(batch):
        step = Step(model, prompt, batch)
        step.run()
        run = step.captured() if way == "graph" else step.run
        if expected:
            step.check(run, expected)
        return speed(bench, run, batch, 1, repeats=bench.options.tokens)


def most(bench: Bench, model: Any, context: int) -> Row:
    """How many sequences fit behind a prompt so long, found by steps that are really run, and
    their speed."""
    if bench.device == "cpu":
        raise NotMeasured("no GPU")
    prompt = Prompt(model, context)

    def peak(batch: int) -> int:
        return peak_bytes(lambda: Step(model, prompt, batch).run())

    def misfit(batch: int) -> str:
        return why_not(partial(peak, batch))

    peak(FEW)  # compiles, and allocates what stays
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    few, many = peak(FEW), peak(MANY)
    per_sequence = (many - few) / (MANY - FEW)
    start = FEW + int((room - few) / per_sequence)
    sequences, limit = largest(misfit, start)
    row = {
        "sequences": sequences,
        "limited_by": limit,
        "peak_bytes_per_sequence": round(per_sequence),
        "cache_bytes_per_sequence": allocated(partial(Step, model, prompt, MANY)) // MANY,
    }
    # Where memory is that full, sometimes a little less fits than did before.
    batch = sequences * 63 // 64
    row |= {"batch": batch, "way": "step"}
    return cell(row, partial(most_speed, bench, model, prompt, batch))


def allocated(make: Callable[[], object]) -> int:
    """Bytes of what is made, as the allocator counts them."""
    before = torch.cuda.memory_allocated()
    result = make()
    size = torch.cuda.memory_allocated() - before
    del result
    return size


def most_speed(bench: Bench, model: Any, prompt: Prompt, batch: int) -> Row:
    free()
    with memory_for(batch):
        return speed(bench, Step(model, prompt, batch).run, batch, 1, repeats=5)


# Processes

MEASURES: dict[str, Callable[[Bench, Job], Iterator[Row]]] = {
    "layerwise": layerwise, "decode": decode, "gradients": gradients, "refit": refitted,
}  # fmt: skip


def measure(options: argparse.Namespace, job: Job) -> None:
    """A job in this process: its rows, and one that says that it is whole."""
    logs.start()
    device = "cpu" if options.tiny else "cuda"
    bench, start = Bench(options, device), time.monotonic()
    errors = 0
    try:
        for row in MEASURES[job.part](bench, job):
            errors += "error" in row
            write(options.out, row)
    except Exception as error:  # before the first cell
        write(options.out, {**job.row(), "error": in_one_line(error)})
        sys.exit(FAILED)
    end = {"whole": True, "errors": errors, "process_seconds": round(time.monotonic() - start, 1)}
    about = {"settings": settings(options), "shapes": bench.shapes, "machine": machine(device)}
    write(options.out, {**job.row(), **end, **about})


def write(out: Path, row: Row) -> None:
    line = json.dumps(row)
    with out.open("a") as file:
        print(line, file=file)
    print(line, flush=True)


def run(options: argparse.Namespace, jobs: list[Job], arguments: list[str]) -> None:
    """Every job in a process of its own, with its share of the time that is left."""
    until = time.monotonic() + options.seconds
    for number, job in enumerate(jobs):
        left = until - time.monotonic()
        weight = WEIGHTS[job.part]
        limit = left * 2 * weight / (weight + sum(WEIGHTS[other.part] for other in jobs[number:]))
        if limit < 1:
            write(options.out, {**job.row(), "error": "not run: --seconds were over"})
            continue
        command = [sys.executable, __file__, *arguments, "--job", job.name(), "--folder",
                   str(options.folder)]  # fmt: skip
        try:
            code = subprocess.run(command, timeout=limit, env={**os.environ, **FIXED}).returncode
        except subprocess.TimeoutExpired:
            write(options.out, {**job.row(), "error": f"ended at {limit:.0f} s: raise --seconds"})
        else:
            if code not in (0, FAILED):
                write(options.out, {**job.row(), "error": f"the process ended with code {code}"})


def settings(options: argparse.Namespace) -> Row:
    """What rows in one file have in common."""
    return {"tiny": options.tiny} | {
        name: getattr(options, name) for name in DEFAULTS if name != "widths"
    }


def jobs_to_do(options: argparse.Namespace) -> list[Job]:
    jobs = []
    for part in options.parts:
        jobs += [Job(part, width) for width in options.widths] if part == "decode" else [Job(part)]
    rows = map(json.loads, options.out.read_text().splitlines()) if options.out.exists() else ()
    done = set()
    for row in rows:
        if row.get("whole") and not row["errors"]:
            if row["settings"] != settings(options):
                raise SystemExit(f"{options.out}: has rows of other settings; give a new file")
            done.add((row["part"], row.get("d_k")))
    return [job for job in jobs if (job.part, job.width) not in done]


def table(rows: list[Row]) -> list[str]:
    """Markdown: decoding by width, ratios against the first one; of cells run twice the last."""
    decoding = [row for row in rows if row["part"] == "decode"]
    widths = list(dict.fromkeys(row["d_k"] for row in decoding))
    figures: dict[str, dict[int, float]] = {}
    for row in decoding:
        for name, value in figures_of(row).items():
            figures.setdefault(name, {})[row["d_k"]] = value
    lines = ["| d_k | " + " | ".join(map(str, widths)) + " |", "|---" * (1 + len(widths)) + "|"]
    for name, values in figures.items():
        whole = values.get(widths[0])
        cells = [
            f"{values[width]:,.0f}" + (f" ({values[width] / whole:.2f})" if whole else "")
            if width in values
            else "not measured"
            for width in widths
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def figures_of(row: Row) -> dict[str, float]:
    """What a row of decoding says, by what it is."""
    if "weight_bytes" in row:
        return {"recurrent state and convolutions, MB": row["computed_bytes"]["recurrent"] / 1e6}
    if "error" in row:
        return {}
    if row.get("way") == "graph":
        return {f"tokens/s, {row['batch']} sequences": row["tokens_per_s"]}
    if "context" in row:
        at = f"of {row['context']:,} tokens"
        return {
            f"sequences that fit, {at}": row["sequences"],
            f"tokens/s with all but 1 in 64 of them, {at}": row["tokens_per_s"],
        }
    return {}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows of JSON")
    parser.add_argument("--table", type=existing, metavar="FILE", help="print rows of JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]))
    parser.add_argument("--seconds", type=float, default=250, help="for all parts (250)")
    parser.add_argument("--each", type=float, default=1.5, help="seconds of a timing (1.5)")
    number: dict[str, Any] = {"type": positive}
    several: dict[str, Any] = {**number, "nargs": "+", "metavar": "N"}
    parser.add_argument("--widths", **several, help=f"d_k {default('widths')}")
    parser.add_argument("--batches", **several, help=f"of decoding {default('batches')}")
    parser.add_argument("--prompt", **number, metavar="N", help=f"its tokens {default('prompt')}")
    parser.add_argument("--contexts", **several, help=f"tokens of what fits {default('contexts')}")
    parser.add_argument("--tokens", **number, metavar="N", help=f"of a run {default('tokens')}")
    parser.add_argument(
        "--sequences", **number, metavar="N", help=f"of text {default('sequences')}"
    )
    parser.add_argument("--length", **number, metavar="N", help=f"their tokens {default('length')}")
    parser.add_argument("--batch", **number, metavar="N", help=f"of calibration {default('batch')}")
    parser.add_argument("--folder", type=Path, help="for the model, a temporary one by default")
    parser.add_argument("--job", type=Job.named, help=argparse.SUPPRESS)
    return parser


def default(option: str) -> str:
    return "(" + str(DEFAULTS[option]).strip("[]") + ")"


def positive(text: str) -> int:
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: a whole number, 1 or more")
    return int(text)


def main() -> None:
    options = parser().parse_args()
    if options.table:
        print("\n".join(table([json.loads(row) for row in options.table.open()])))
        return
    if not options.out:
        parser().error("give --out or --table")
    for option, value in (TINY if options.tiny else DEFAULTS).items():
        if getattr(options, option) is None:
            setattr(options, option, value)
    if options.job:
        measure(options, options.job)
        return
    if not (options.tiny or torch.cuda.is_available()):
        parser().error(f"torch {torch.__version__} finds no GPU here; --tiny runs on a CPU")
    if not options.out.parent.is_dir():
        parser().error(f"--out {options.out}: {options.out.parent} is no folder")
    if options.folder and options.folder.exists() and any(options.folder.iterdir()):
        parser().error(f"--folder {options.folder}: give a new or an empty folder")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    shapes = TINY_SHAPES if options.tiny else SHAPES
    print("shapes:", ", ".join(f"{key} {value}" for key, value in shapes.items()), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = Path(folder)
        run(options, jobs_to_do(options), sys.argv[1:])


if __name__ == "__main__":
    main()
