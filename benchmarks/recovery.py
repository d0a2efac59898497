"""Recovery at full size: its pace and memory, against the obvious loss, and that it survives.

    python benchmarks/recovery.py --gpu --folder F --out results.jsonl [PART ...]
    python benchmarks/recovery.py --folder F          the same at a toy size on a CPU
    python benchmarks/recovery.py --gpu --folder F --out results.jsonl --models NAME ...
                                                      does it fit? Memory of config/paper.yaml's
                                                      models (without --gpu those of demo.yaml)

A model of the shape of config/paper.yaml's DeltaNet 370M, with random weights, is cut to 50 % of
its key channels and to 25 %, the latter padded while it trains, and both are recovered for some
steps on random text by `statecut.training.training.recover`, as it is. Neither time nor memory
depends on what the numbers are. Parts, each a process of its own with a time limit:

    half, quarter                    steps of both: tokens/s, peak memory; merged, saved, reloaded
    half-logits, quarter-logits      the same with the logits of both models in memory
    half-parts                       each batch in two gradient accumulation steps
    killed                           `half` killed with kill -9 and started again: same losses?
    fused                            the loss alone, against flash-linear-attention's fused ones

With `--models`, every model, ratio (0 is the unpruned one), number of parts and width that it is
padded to is a process of its own that trains for some steps and ends before it would merge. Tiles
are chosen as in speed.py. What padding costs at d_k 32:

    python benchmarks/recovery.py --gpu --folder F --out results.jsonl --models delta_net_1.3B \\
        --ratios 0.75 --in-parts 1 --pad-to 0 64

Cells that are in the file of results already are not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from training import CONFIG as DEMO
from training import tokens

from reproduction.config import load_config
from statecut import logs
from statecut.arguments import width as width_of
from statecut.errors import InputError
from statecut.files import read_json, write_json

CONFIG = Path(__file__).parents[1] / "config" / "paper.yaml"
FITS = 76  # GiB in use that fit into a GPU of 80 GB, beside what its driver takes
PARTS = ("half", "quarter", "half-logits", "quarter-logits", "half-parts", "killed", "fused")
WARMUP = 4  # steps before the clock: the first ones tune kernels
KILLED_AT = 7  # steps


@dataclass(frozen=True)
class Size:
    model: dict[str, Any]
    width: int  # d_k of the teacher
    batch: int
    length: int


def size(gpu: bool, batch: int) -> Size:
    if gpu:
        model = load_config(CONFIG).models["delta_net_370M"]
        return Size(model.fla_config(), model.head_k_dim, batch, 2048)
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 512}
    return Size({"model_type": "delta_net", "intermediate_size": 128, **small}, 32, 2, 96)


def prepare(folder: Path, size: Size) -> None:
    """The teacher and its two students."""
    from statecut.models import create, save
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.slicing import cut_back, slice_model

    if not (folder / "teacher").exists():
        save(create(size.model, seed=0), folder / "teacher")
    teacher = Checkpoint(folder / "teacher")
    for name, width in (("half", size.width // 2), ("quarter", size.width // 4)):
        if not (folder / name).exists():
            slice_model(teacher, cut_back(teacher.shape, width), folder / name)


def logits_loss(adapted: Any, teacher: Any, ids: Any, settings: Any) -> Any:
    """The obvious loss: the logits of all tokens, of both models, and what is computed of them."""
    import torch
    import torch.nn.functional as F

    from statecut.recovery.distillation import IGNORED, next_tokens
    from statecut.recovery.loop import Losses

    student = adapted.get_base_model()
    T = settings.distillation.temperature
    with torch.no_grad():
        hidden = teacher.model(ids, use_cache=False).last_hidden_state
        taught = (teacher.lm_head(hidden).float() / T).log_softmax(-1)
    hidden = student.model(ids, use_cache=False).last_hidden_state
    logits = student.lm_head(hidden).float()
    ce = F.cross_entropy(logits.flatten(0, 1), next_tokens(ids).flatten(), ignore_index=IGNORED)
    pairs = (logits / T).log_softmax(-1).flatten(0, 1), taught.flatten(0, 1)
    kd = T**2 * F.kl_div(*pairs, reduction="batchmean", log_target=True)
    return Losses(ce + settings.distillation.weight * kd, ce, kd)


class Clock:
    """Around the loss of `recover`: when each step began, and the memory after the warm-up."""

    def __init__(self, loss: Any, parts: int) -> None:
        self.loss = loss
        self.parts = parts
        self.calls = 0
        self.began: list[float] = []
        self.peak = 0  # bytes, the warm-up included

    def __call__(self, *arguments: Any) -> Any:
        if self.calls % self.parts == 0:
            self.now()
        self.calls += 1
        return self.loss(*arguments)

    def now(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        self.began.append(time.perf_counter())
        if len(self.began) == WARMUP + 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        print(f"step {len(self.began)}", flush=True)

    def seconds(self) -> float:
        """Of a step, after the warm-up."""
        first = min(WARMUP, len(self.began) - 2)  # a run that goes on may have few steps left
        return (self.began[-1] - self.began[first]) / (len(self.began) - 1 - first)


def recovered(
    folder: Path, size: Size, steps: int, student: str, *, way: str, run: str
) -> dict[str, Any]:
    """Recover a student for some steps, with a clock; then load what was written."""
    import torch

    from statecut.models import load
    from statecut.recovery import training
    from statecut.recovery.checkpoints import Output

    gpu = torch.cuda.is_available()
    section = load_config(CONFIG).recovery
    assert section is not None
    parts = 2 if way == "parts" else 1
    changes = {"steps": steps, "batch": size.batch, "gradient_accumulation_steps": parts}
    settings = section.model_copy(update={**changes, "warmup": 2}).settings()
    data = tokens(
        folder / f"{run}-tokens", settings.sequences, size.length, size.model["vocab_size"]
    )
    clock = Clock(logits_loss if way == "logits" else training.recovery_loss, parts)
    training.recovery_loss = clock
    ids = torch.from_numpy(data[:2]).to("cuda" if gpu else "cpu")
    kept: dict[str, Any] = {}
    train = training.train

    def train_and_look(adapted: Any, *others: Any, **options: Any) -> None:
        train(adapted, *others, **options)
        clock.now()
        if gpu:
            kept["gibibytes"] = torch.cuda.max_memory_allocated() / 2**30
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=gpu):
            kept["logits"] = adapted(ids, use_cache=False).logits.float()

    training.train = train_and_look
    out = folder / f"{run}-recovered"
    training.recover(
        folder / student, folder / "teacher", data, settings,
        Output(out, folder / "running" / run, force=True),
        device="cuda" if gpu else "cpu",
        padded_to=size.width // 2 if student == "quarter" else None,
    )  # fmt: skip
    # As it was trained, so that only the merge and the type on disk make a difference; then as
    # users load it, which differs by the rounding of everything that is computed.
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=gpu):
        again = load(out, device=ids.device, dtype=torch.float32)(ids, use_cache=False).logits
    with torch.no_grad():
        rounded = load(out, device=ids.device)(ids, use_cache=False).logits.float()
    with open(out / "loss.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return {
        "d_k": size.width // (4 if student == "quarter" else 2),
        "tokens_per_second": size.batch * size.length / clock.seconds(),
        "gibibytes": kept.get("gibibytes"),
        "losses": losses,
        "reloaded_difference": relative(again.float(), kept["logits"]),
        "rounding_difference": relative(rounded, again.float()),
        "first_step_seconds": clock.began[1] - clock.began[0],
    }


def prepare_model(arguments: argparse.Namespace, name: str) -> None:
    """A model of the configuration with random weights, and its students."""
    import torch

    from statecut.models import create, save
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.slicing import cut_back, slice_model

    model = load_config(CONFIG if arguments.gpu else DEMO).models[name]
    if not (arguments.folder / name).exists():
        with torch.device("cuda" if arguments.gpu else "cpu"):
            new = create(model.fla_config(), seed=0, dtype=torch.bfloat16)
        save(new, arguments.folder / name)
    teacher = Checkpoint(arguments.folder / name)
    for ratio in arguments.ratios:
        student = student_folder(arguments.folder, name, ratio)
        if not student.exists():
            kept = cut_back(teacher.shape, width_of(model.head_k_dim, ratio))
            slice_model(teacher, kept, student)


def student_folder(folder: Path, model: str, ratio: float) -> Path:
    """The unpruned model is its own student."""
    return folder / f"{model}-{ratio:g}" if ratio else folder / model


def cells(arguments: argparse.Namespace) -> list[str]:
    """The largest first: a model at a ratio with so many parts, padded or not."""
    return [
        f"{model}-{ratio:g}-{parts}" + (f"p{padded_to}" if padded_to else "")
        for model in arguments.models
        for ratio in arguments.ratios
        for parts in arguments.in_parts
        for padded_to in arguments.pad_to
    ]


class Trained(Exception):
    """Raised when all steps are done, since merging and writing need no measurement."""


def memory(arguments: argparse.Namespace, cell: str) -> dict[str, Any]:
    """Some steps of recovery as the workflow does them: their memory and their pace."""
    import torch

    from statecut.models.checkpoint import Checkpoint
    from statecut.recovery import training
    from statecut.recovery.checkpoints import Output

    model, ratio, parts = cell.rsplit("-", 2)
    parts, _, padded_to = parts.partition("p")
    folder, gpu = arguments.folder, arguments.gpu
    device = torch.device("cuda" if gpu else "cpu")
    if gpu and arguments.memory:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.memory * 2**30 / whole)
    section = load_config(CONFIG if gpu else DEMO).recovery
    assert section is not None
    changes = {"steps": arguments.steps, "warmup": 2, "gradient_accumulation_steps": int(parts)}
    settings = section.model_copy(update=changes).settings()
    student = Checkpoint(student_folder(folder, model, float(ratio)))
    length = 2048 if gpu else 96
    data = tokens(
        folder / f"{cell}-tokens", settings.sequences, length, student.config["vocab_size"]
    )
    clock = Clock(training.recovery_loss, int(parts))
    training.recovery_loss = clock
    train = training.train

    def train_alone(*others: Any, **options: Any) -> None:
        train(*others, **options)
        clock.now()
        raise Trained

    training.train = train_alone
    running = folder / "running" / cell
    shutil.rmtree(running, ignore_errors=True)  # of an earlier try, from which it would go on
    about = {
        "model": model,
        "ratio": float(ratio),
        "d_k": student.shape.width,
        "padded_to": int(padded_to or 0),
        "parts": int(parts),
        "batch": settings.batch,
    }
    try:
        training.recover(
            student.folder, folder / model, data, settings,
            Output(folder / f"{cell}-recovered", running),
            device=device, padded_to=int(padded_to) if padded_to else None,
        )  # fmt: skip
    except InputError as error:
        return {**about, "error": str(error)}
    except Trained:
        pass
    result = {**about, "tokens_per_second": settings.batch * length / clock.seconds()}
    steps = [end - start for start, end in pairwise(clock.began)]
    result["first_step_seconds"] = steps[0]
    result["step_seconds"] = [round(seconds, 4) for seconds in steps[WARMUP:]]
    if gpu:
        result["gibibytes"] = clock.peak / 2**30
        result["reserved"] = torch.cuda.max_memory_reserved() / 2**30
        result["fits_80_gb"] = result["reserved"] < FITS
    return result


def relative(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


def killed(folder: Path, size: Size, gpu: bool, steps: int) -> dict[str, Any]:
    """A process that recovers, killed in the middle, then started again."""
    curves = folder / "running" / "killed"
    words = [sys.executable, __file__, "--folder", str(folder), "--child", "killed"]
    words += ["--steps", str(steps), "--batch", str(size.batch)] + ["--gpu"] * gpu
    going = subprocess.Popen(words)
    done = 0
    while done < KILLED_AT and going.poll() is None:
        time.sleep(0.05)
        done = max((p.read_text().count("\n") - 1 for p in curves.glob("*/loss.csv")), default=0)
    going.send_signal(signal.SIGKILL)
    code = going.wait()
    subprocess.run(words, check=True)
    losses = read_json(folder / "killed.json")["losses"]
    unbroken = read_json(folder / "half.json")["losses"]
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, unbroken, strict=True)]
    return {"killed_at": done, "code": code, "largest_difference": max(apart), "steps": len(apart)}


def fused(size: Size) -> dict[str, Any]:
    """The loss of one batch and its gradient: ours, and fla's two fused functions in sequence."""
    import torch
    import torch.nn.functional as F
    from fla.modules import FusedKLDivLoss, FusedLinearCrossEntropyLoss

    from statecut.recovery.distillation import IGNORED, distillation_losses

    T, vocabulary, hidden = 2.0, size.model["vocab_size"], size.model["hidden_size"]
    draw = torch.Generator("cuda").manual_seed(0)
    shape = size.batch, size.length, hidden

    def normal(*sizes: int, std: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(sizes, generator=draw, device="cuda") * std
        return drawn.to(torch.bfloat16)

    x, taught = normal(*shape).requires_grad_(), normal(*shape)
    head, taught_head = normal(vocabulary, hidden, std=0.02), normal(vocabulary, hidden, std=0.02)
    targets = torch.randint(vocabulary, shape[:2], generator=draw, device="cuda")
    targets[:, -1] = IGNORED

    def ours() -> tuple[torch.Tensor, ...]:
        return distillation_losses(x, head, taught, taught_head, targets, T, 1.0)

    def theirs() -> tuple[torch.Tensor, ...]:
        # Their divergence knows no temperature, but a linear head does: W (x / T) = (W x) / T.
        ce = FusedLinearCrossEntropyLoss(ignore_index=IGNORED)(
            x.flatten(0, 1), targets.flatten(), head
        )
        pair = (x / T).flatten(0, 1), (taught / T).flatten(0, 1)
        kd = T**2 * FusedKLDivLoss()(*pair, head, taught_head)
        return ce + kd, ce, kd

    def obvious() -> tuple[torch.Tensor, ...]:
        """In float32, a sequence at a time."""
        ce = kd = torch.zeros((), device="cuda")
        for some, other, wanted in zip(x, taught, targets, strict=True):
            logits = F.linear(some.float(), head.float())
            other_logits = F.linear(other.float(), taught_head.float())
            ce = ce + F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
            pair = (logits / T).log_softmax(-1), (other_logits / T).log_softmax(-1)
            kd = kd + T**2 * F.kl_div(*pair, reduction="sum", log_target=True)
        ce, kd = ce / (targets != IGNORED).sum(), kd / targets.numel()
        return ce + kd, ce, kd

    result: dict[str, Any] = {}
    gradients = {}
    for name, function in (("obvious", obvious), ("statecut", ours), ("fla", theirs)):
        try:
            times = []
            for _ in range(1 if name == "obvious" else 5):
                x.grad = None
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before, began = torch.cuda.memory_allocated(), time.perf_counter()
                loss, ce, kd = function()
                loss.backward()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            assert x.grad is not None
            gradients[name] = x.grad.float()
            result[name] = {
                "ce": ce.item(),
                "kd": kd.item(),
                "gradient_error": relative(gradients[name], gradients["obvious"]),
                "seconds": min(times),
                "gibibytes": (torch.cuda.max_memory_allocated() - before) / 2**30,
            }
        except Exception as error:  # a part that fails is a result, and the others still count
            result[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(name, result[name], flush=True)
    return result


def child(arguments: argparse.Namespace, part: str) -> dict[str, Any]:
    if part in arguments.models:
        prepare_model(arguments, part)
        return {}
    if part in cells(arguments):
        return memory(arguments, part)
    here = size(arguments.gpu, arguments.batch)
    folder = arguments.folder
    if part == "prepare":
        prepare(folder, here)
        return {}
    if part == "fused":
        return fused(here)
    if part == "killed" and not arguments.child:
        return killed(folder, here, arguments.gpu, arguments.steps)
    student, _, way = part.partition("-")
    student = "half" if student == "killed" else student
    return recovered(folder, here, arguments.steps, student, way=way, run=part)


def run(arguments: argparse.Namespace, part: str) -> dict[str, Any]:
    """One part as a process with a time limit; what went wrong, if it did."""
    words = [sys.executable, "-u", __file__, *sys.argv[1:], "--part", part]
    print(f"== {part}", flush=True)
    began = time.monotonic()
    try:
        # A session of its own, so that its own children end with it.
        with subprocess.Popen(words, start_new_session=True) as process:
            try:
                code = process.wait(arguments.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return {"part": part, "error": f"no end after {arguments.limit} s"}
        result = read_json(arguments.folder / f"{part}.json") if code == 0 else {}
    except OSError as error:
        return {"part": part, "error": str(error)}
    failed = {} if code == 0 else {"error": f"ended with code {code}"}
    return {"part": part, "seconds": round(time.monotonic() - began, 1), **result, **failed}


def ratios(results: dict[str, dict[str, Any]]) -> None:
    for name, other, way in (
        ("half", "half-logits", "with all logits"),
        ("quarter", "quarter-logits", "with all logits"),
        ("half-parts", "half", "with the batch in one"),
    ):
        ours, beside = results.get(name, {}), results.get(other, {})
        if "losses" not in ours or "losses" not in beside:
            continue
        speed = ours["tokens_per_second"] / beside["tokens_per_second"]
        apart = max(abs(a - b) / b for a, b in zip(ours["losses"], beside["losses"], strict=True))
        said = f"{name}, d_k {ours['d_k']}: {ours['tokens_per_second']:,.0f} tokens/s, "
        said += f"{speed:.2f} x that {way}"
        if ours["gibibytes"] is not None:
            memory = ours["gibibytes"] / beside["gibibytes"]
            said += f"; {ours['gibibytes']:.1f} GiB, {memory:.2f} x"
        print(f"{said}; losses within {apart:.1e}", flush=True)


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="some of " + ", ".join(PARTS))
    parser.add_argument("--gpu", action="store_true", help="at the paper's size")
    parser.add_argument("--folder", type=Path, required=True, help="for models and checkpoints")
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON per part")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, on a GPU")
    parser.add_argument("--limit", type=float, default=420, help="seconds for one part")
    parser.add_argument(
        "--models", nargs="+", default=[], help="do these of the configuration fit?"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[0, 0.5], help="0 is unpruned")
    parser.add_argument("--in-parts", type=int, nargs="+", default=[1, 2],
                        help="gradient accumulation steps")  # fmt: skip
    parser.add_argument("--pad-to", type=int, nargs="+", default=[0], help="d_k; 0 is unpadded")
    parser.add_argument("--memory", type=float, help="GiB, as if the GPU had no more")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # what a process of ours does
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if one := arguments.child or arguments.part:
        write_json(arguments.folder / f"{one}.json", child(arguments, one))
        return
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: choose from {', '.join(PARTS)}")
    known = load_config(CONFIG if arguments.gpu else DEMO).models
    for model in arguments.models:
        if model not in known:
            parser.error(f"no model {model!r}: choose from {', '.join(known)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    done = set()
    if arguments.out and arguments.out.exists():
        records = map(json.loads, arguments.out.read_text().splitlines())
        done = {record["part"] for record in records if "error" not in record}
    parts = arguments.parts or [p for p in PARTS if arguments.gpu or p != "fused"]
    parts = ["prepare", *parts]
    if arguments.models:
        parts = [*arguments.models, *(cell for cell in cells(arguments) if cell not in done)]
    results = {}
    for part in parts:
        results[part] = run(arguments, part)
        print(json.dumps(results[part]), flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(json.dumps(results[part]) + "\n")
    ratios(results)


if __name__ == "__main__":
    main()
