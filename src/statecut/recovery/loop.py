"""The loop that pretraining and recovery share.

A step depends only on the weights, AdamW's moments and its number, which gives the learning rate
and the batch. So a run that is killed and started again computes, on a CPU with the same number of
threads, the same bits as one that was never killed. (transformers' Trainer filters non-finite
losses out of its logs.)
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from statecut.data.packing import PackedTokens
from statecut.data.progress import Progress
from statecut.errors import InputError
from statecut.files import atomic_write
from statecut.recovery.checkpoints import Checkpoints
from statecut.recovery.settings import Training

logger = logging.getLogger(__name__)

EXIT_UNFINISHED = 75  # was told to stop, has saved, goes on when started again (EX_TEMPFAIL)
PATIENCE = 8  # non-finite steps in a row that end a run
RESERVE = 120.0  # seconds before the end of a Slurm job that are kept for saving
OUT_OF_MEMORY = "out of memory"  # in the messages of torch, Triton and the driver

Weights = dict[str, nn.Parameter]

COLUMNS = ("step", "tokens", "loss", "ce", "kd", "lr", "grad_norm")


class Losses(NamedTuple):
    """The loss of a batch, and the cross-entropy and divergence that it is made of."""

    total: Tensor
    ce: Tensor
    kd: Tensor | None = None


def last_moment() -> float:
    """When the last step has to be over, in seconds since 1970. Slurm can warn by a signal, too,
    but that ends whatever stands between Slurm and the trainer."""
    return float(os.environ.get("SLURM_JOB_END_TIME", "inf")) - RESERVE


def check_data(data: PackedTokens, settings: Training, vocab_size: int) -> None:
    """An error if there is too little data for the steps, or it has tokens beyond the model's."""
    available = len(data) * settings.epochs
    if settings.sequences > available:
        passes = f" in {settings.epochs} epochs" if settings.epochs > 1 else ""
        raise InputError(
            f"{settings.data}: {settings.steps} steps need {settings.sequences} sequences, there "
            f"are {available}{passes}; ask for fewer steps, more epochs or give more text"
        )
    if data.manifest.vocabulary_size > vocab_size:
        raise InputError(
            f"{settings.data} was packed with {data.manifest.vocabulary_size} tokens, the model's "
            f"vocab_size is {vocab_size}: pack it with the model's tokenizer"
        )


def learning_rate(step: int, settings: Training) -> float:
    """The rate of step 1, 2, ...: up a line to the peak at the end of the warm-up, then down half
    a cosine to the floor at the last step."""
    if step <= settings.warmup:
        return settings.learning_rate * step / settings.warmup
    done = (step - settings.warmup) / (settings.steps - settings.warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.floor + (1 - settings.floor) * cosine)


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Losses],
    data: PackedTokens,
    settings: Training,
    checkpoints: Checkpoints,
    *,
    work: str,
    save_seconds: float,
) -> None:
    """Train those parameters of the model that require gradients, from the last checkpoint on.

    `loss` takes tokens, (sequences, length). Ctrl-C, SIGTERM, SIGUSR1 and the end of a Slurm job
    save and leave with EXIT_UNFINISHED.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = AdamW(
        trained.values(),
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    first, failed = _resume(checkpoints, optimizer, trained)
    if first:
        logger.info(f"{work}: resumes from step {first}")
    tokens = settings.batch * data.manifest.sequence_length
    batches = data.batches(settings.batch, seed=settings.seed, start=first)
    progress = Progress(work, tokens=(settings.steps - first) * tokens)
    saved_at = time.monotonic()
    model.train()
    with stop_on_signals() as stop, open(checkpoints.curve, "a", buffering=1) as curve:
        for step, ids in zip(range(first + 1, settings.steps + 1), batches, strict=False):
            began = time.time()
            rate = learning_rate(step, settings)
            pieces = settings.gradient_accumulation_steps
            microbatches = torch.from_numpy(ids).to(_device(trained)).chunk(pieces)
            total, ce, kd = _backward(loss, microbatches)
            norm = nn.utils.clip_grad_norm_(trained.values(), settings.clip).item()
            finite = math.isfinite(total) and math.isfinite(norm)
            failed = 0 if finite else failed + 1
            if finite:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
            optimizer.zero_grad()
            curve.write(curve_row(step, step * tokens, total, ce, kd, rate, norm))
            note = f"step {step:,} of {settings.steps:,}, loss {total:.3f}"
            progress.add(tokens=tokens, note=note)
            if failed == PATIENCE:
                raise InputError(
                    f"{work}: {PATIENCE} steps in a row were not finite, the last of them step "
                    f"{step} (loss {total}, gradient norm {norm}); try a lower learning rate. "
                    f"The checkpoint before it is in {checkpoints.folder}"
                )
            now = time.time()
            if now + (now - began) > last_moment():  # the next step takes as long as this one
                stop.set()
            late = time.monotonic() - saved_at >= save_seconds
            leave = stop.is_set()  # asked once: who leaves has saved
            if leave or step == settings.steps or late:
                checkpoints.save(_tensors(optimizer, trained, step, failed))
                saved_at = time.monotonic()
            if leave and step < settings.steps:
                logger.info(f"{work}: saved at step {step}; the same command goes on from there")
                raise SystemExit(EXIT_UNFINISHED)
    model.eval()


def _backward(loss: Callable[[Tensor], Losses], microbatches: tuple[Tensor, ...]) -> list[Any]:
    """Add up the gradients of a step; the means of its losses: total, cross-entropy, divergence."""
    computed = []
    for ids in microbatches:
        # Weights and moments stay float32; on a GPU only what is computed from them is bf16.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            losses = loss(ids)
        (losses.total / len(microbatches)).backward()
        computed.append(losses)
    return [
        None if column[0] is None else torch.stack(column).detach().mean().item()
        for column in zip(*computed, strict=True)
    ]


def curve_row(*values: float | None) -> str:
    """A line of the loss curve; a value that is None is left empty."""
    return ",".join("" if value is None else f"{value:.9g}" for value in values) + "\n"


def cut_curve(curve: Path, last: int) -> None:
    """Keep the rows of a loss curve up to a step."""
    rows = curve.read_text().splitlines(keepends=True)[1:] if curve.exists() else []
    complete = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= last]
    with atomic_write(curve, force=True) as aside:
        aside.write_text(",".join(COLUMNS) + "\n" + "".join(complete))


def _tensors(optimizer: AdamW, trained: Weights, step: int, failed: int) -> dict[str, Tensor]:
    """All that a run goes on from: weights, moments, random state, steps done, failed in a row."""
    tensors = {"random.cpu": torch.get_rng_state(), "run.steps": torch.tensor([step, failed])}
    if (device := _device(trained)).type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    for name, parameter in trained.items():
        tensors[f"weight.{name}"] = parameter.detach()
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = value
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _device(trained: Weights) -> torch.device:
    return next(iter(trained.values())).device


def _resume(checkpoints: Checkpoints, optimizer: AdamW, trained: Weights) -> tuple[int, int]:
    """Restore the last checkpoint: the steps done, and how many of the last were not finite."""
    tensors = checkpoints.last()
    step, failed = tensors.pop("run.steps").tolist() if tensors else (0, 0)
    cut_curve(checkpoints.curve, step)
    if tensors is None:
        return 0, 0
    torch.set_rng_state(tensors.pop("random.cpu"))
    if (device := _device(trained)).type == "cuda":
        torch.cuda.set_rng_state(tensors.pop("random.cuda"), device)
    for key, tensor in tensors.items():
        kind, name = key.split(".", 1)
        if kind == "weight":
            trained[name].data.copy_(tensor)
        else:  # AdamW counts its steps on the CPU
            optimizer.state[trained[name]][kind] = tensor.to("cpu" if kind == "step" else device)
    return step, failed


@contextmanager
def explain_out_of_memory(work: str, advice: str) -> Iterator[None]:
    """Turns a lack of GPU memory into one line that says what can be changed."""
    try:
        yield
    except RuntimeError as error:  # torch's own kind, or what Triton or the driver says
        if OUT_OF_MEMORY not in str(error):
            raise
        raise InputError(f"{work}: {first_sentences(str(error))}; {advice}") from None


def first_sentences(text: str) -> str:
    """Of torch's message: what it wanted to allocate, and what there was."""
    return ". ".join(text.strip().split("\n")[0].split(". ")[:3]).rstrip(".")


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM, SIGUSR1 or the first Ctrl-C sets, so that the step is finished."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def handle(number: int, _: object) -> None:
        stop.set()
        if number == signal.SIGINT:  # the second one does not wait
            signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():  # no other may have handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
