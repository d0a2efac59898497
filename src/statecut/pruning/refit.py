"""Refit: what is linear behind each pruned mixer, fitted again by least squares.

Cutting channels changes what a delta rule puts out, and the projection behind it was made for the
old output. It is linear, so its best new value has a closed form; so has the MLP's second
matrix. Layer by layer, everything before it refitted already, over the tokens of a text:

    X    (tokens, n)       what enters the projection in the pruned model
    E    (tokens, hidden)  the residual stream behind it, the unpruned model's less the pruned one's
    W <- W + E^T X (X^T X + ridge mean(diag X^T X) I)^-1

which shrinks towards the old W. The ridge of each projection is the one whose solution on most of
the text has the smallest error on the rest of it; infinity, the old W, is among them.

Both models go through the text layer by layer, so that only one layer of each is in memory: once
through the unpruned model and three times through the pruned one, whatever the number of layers.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from statecut.data.progress import Progress
from statecut.errors import InputError
from statecut.evaluation.perplexity import embedding
from statecut.files import atomic_write
from statecut.models.checkpoint import Checkpoint, rewrite
from statecut.models.delta_rule import no_tf32, wide
from statecut.models.description import Description
from statecut.models.layerwise import LayerwiseModel
from statecut.models.loaded import Loaded
from statecut.record import FILE, Record

logger = logging.getLogger(__name__)

RIDGES = (math.inf, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Of these the best is taken, the first of equals."""
HELD_OUT = 8  # one sequence of so many chooses the ridge
CONTEXT = 8  # tokens that make a place in a text another one
DOWN_PROJ = "mlp.down_proj"


@dataclass(frozen=True)
class Fit:
    """How a projection was fitted. The error is a sum of squares, relative to the old weights'."""

    name: str  # of the tensor
    ridge: float
    error: float  # on all text


@dataclass(frozen=True, repr=False)
class Refit:
    """The new weights by name, in the type of the old ones, and how they came about."""

    weights: dict[str, Tensor]
    fits: tuple[Fit, ...]
    tokens: int

    def __repr__(self) -> str:
        return f"Refit({len(self.fits)} projections, on {self.tokens:,} tokens)"

    def entry(self) -> dict[str, Any]:
        """What a record says of it."""
        matrices = Counter(fit.name.split(".")[-2] for fit in self.fits)
        error = sum(fit.error for fit in self.fits) / len(self.fits)
        return {"projections": dict(matrices), "error": error, "tokens": self.tokens}


def refit(
    student: Checkpoint | Loaded,
    teacher: Checkpoint | Loaded,
    ids: Tensor,
    *,
    device: str = "cpu",
    batch: int = 8,
    ridges: Sequence[float] = RIDGES,
) -> Refit:
    """Fit the projections of a pruned model to the model it was cut from.

    `ids` (sequences, length) is the text; `batch` sequences of it are run at a time.
    """
    check_refit(student, len(ids), ids.shape[1], ids)
    check_cut_from(student, teacher)
    chooses = torch.arange(len(ids)) % HELD_OUT == 0  # the ridge
    most, held_out = ids[~chooses].split(batch), ids[chooses].split(batch)
    dtype = student.compute_dtype(device)
    weights: dict[str, Tensor] = {}
    fits: list[Fit] = []
    with torch.no_grad(), no_tf32():
        pruned = LayerwiseModel(student, [*most, *held_out], device, dtype)
        unpruned = LayerwiseModel(teacher, [*most, *held_out], device, dtype)
        progress = Progress("refit", tokens=ids.numel() * len(pruned.layers))
        for index, layer in enumerate(pruned.layers):
            with pruned.filled(index), unpruned.filled(index):
                if index not in student.shape.layers:
                    unpruned.run_all(index)
                for projection in projections(student, layer, index):
                    name = f"{pruned.prefix}{index}.{projection}.weight"
                    old = student.tensor(student.stored[name])
                    sums = _add_up(pruned, unpruned, index, projection, first_held_out=len(most))
                    weights[name], fit = _fit(name, old, *sums, ridges)
                    fits.append(fit)
                    layer.get_submodule(projection).weight.copy_(weights[name])
                pruned.run_all(index)
            progress.add(tokens=ids.numel(), note=f"layer {index + 1} of {len(pruned.layers)}")
            pruned.step()
            unpruned.step()
    return Refit(weights, tuple(fits), ids.numel())


def check_refit(
    checkpoint: Checkpoint | Loaded, sequences: int, length: int, ids: Tensor | None = None
) -> None:
    """An error if the model, pruned or not, cannot be refitted on so much text, or on these token
    ids: least squares on a text that says the same over and over would ruin all other text."""
    checkpoint.check_runs()
    if checkpoint.config.get("attnres_block_size") is not None:
        raise InputError(
            f"{checkpoint.place}: attnres_block_size is set: its layers read more than the "
            "residual stream, which refit does not carry"
        )
    if sequences < 2:
        raise InputError(f"refit: {sequences} sequence of text; give at least 2, one is held out")
    tokens = (sequences - math.ceil(sequences / HELD_OUT)) * length
    kind, layers = checkpoint.architecture, checkpoint.shape.layers
    fitted = [kind.name(layer, kind.o_proj) for layer in layers]
    fitted += [f"{kind.prefix}{layer}.{DOWN_PROJ}.weight" for layer in layers]
    headers, stored = dict(checkpoint.headers()), checkpoint.stored
    unknowns, name = max((headers[stored[n]].shape[1], n) for n in fitted if n in stored)
    unknown = f"the {unknowns:,} unknowns that each output of {name} has"
    if tokens < unknowns:
        raise InputError(
            f"refit: {tokens:,} tokens of text (one sequence of {HELD_OUT} is held out) for "
            f"{unknown}; give at least as many, better ten times that, by --sequences or --length"
        )
    if ids is not None:
        stretches = ids.unfold(1, min(CONTEXT, length), 1).flatten(0, 1)
        different = len(np.unique(stretches.numpy(), axis=0))
        if different < min(unknowns, len(stretches)):
            raise InputError(
                f"refit: the text repeats itself: its {ids.numel():,} tokens have {different:,} "
                f"different stretches of {CONTEXT}, for {unknown}; give a --text that says more"
            )


def write_refitted(
    student: Checkpoint,
    result: Refit,
    out: Path | str,
    *,
    files: Mapping[str, str] | None = None,
    force: bool = False,
    links: bool = False,
) -> None:
    """The pruned model with its new weights, as a folder of the same shapes and types; `files` are
    texts to put beside it."""
    with atomic_write(out, force=force, folder=True) as aside:
        rewrite(student, aside, result.weights.get, links=links)
        for name, text in (files or {}).items():
            (aside / name).write_text(text)


def projections(checkpoint: Description, layer: nn.Module, index: int) -> list[str]:
    """Those of a layer that are fitted, in the order in which they come."""
    if index not in checkpoint.shape.layers:
        return []
    _, mixer = checkpoint.architecture.mixer.split("{layer}.")
    o_proj = mixer + checkpoint.architecture.o_proj.removesuffix(".weight")
    has_mlp = any(name == DOWN_PROJ for name, _ in layer.named_modules())  # or else experts
    return [o_proj, DOWN_PROJ] if has_mlp else [o_proj]


def observe(
    model: LayerwiseModel, index: int, batch: int, projection: str
) -> tuple[Tensor, Tensor]:
    """One batch through a filled layer: what enters a projection, and the residual stream behind
    it; float32 or wider, (tokens, ...). Several streams are as many rows of a token, with the
    inputs times what each stream gets of the output: so theirs is one least squares problem."""
    layer, kind = model.layers[index], model.source.architecture
    fused = projection == DOWN_PROJ and getattr(layer.mlp, "fuse_swiglu", False)
    if fused:
        layer.mlp.fuse_swiglu = False  # fla's fused kernel takes its weight without a call
    captured: dict[str, tuple[Tensor, Any]] = {}

    def keep(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        captured[name] = args[0], output

    hooks = [
        layer.get_submodule(name).register_forward_hook(partial(keep, name))
        for name in (projection, *(kind.streams or ()))
    ]
    try:
        model.run(index, batch)
    finally:
        if fused:
            layer.mlp.fuse_swiglu = True
        for hook in hooks:
            hook.remove()
    inputs, output = map(wide, captured[projection])
    behind_mlp = projection == DOWN_PROJ
    if kind.streams:
        mixer, mlp = kind.streams
        _, mixed = captured[mlp if behind_mlp else mixer]
        inputs = inputs.unsqueeze(-2) * wide(mixed[kind.shares]).unsqueeze(-1)
        stream = wide(model.next[batch] if behind_mlp else captured[mlp][0])
        stream = stream.view(*inputs.shape[:-1], -1)
    elif behind_mlp:
        stream = wide(model.next[batch])
    else:
        stream = wide(model.states[batch]) + output
    return inputs.flatten(0, -2), stream.flatten(0, -2)


@dataclass
class _Sums:
    """Over the rows of X, E: what least squares needs of them, in float64."""

    gram: Tensor  # X^T X, (n, n)
    cross: Tensor  # E^T X, (hidden, n)
    square: Tensor  # of E

    @classmethod
    def zeros(cls, inputs: int, outputs: int, device: str) -> _Sums:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        return cls(zeros(inputs, inputs), zeros(outputs, inputs), zeros(()))

    def add(self, X: Tensor, E: Tensor) -> None:
        """X: (rows, n), E: (rows, hidden), float32 or wider."""
        self.gram += X.mT @ X
        self.cross += E.mT @ X
        self.square += E.square().sum(dtype=torch.float64)

    def __add__(self, other: _Sums) -> _Sums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Sums(*(mine + theirs for mine, theirs in pairs))

    def error(self, D: Tensor) -> float:
        """|E - X D^T|^2 for a change D (hidden, n) of the weight."""
        change = torch.sum((D @ self.gram - 2 * self.cross) * D)
        return float(self.square + change)

    def solve(self, ridge: float) -> Tensor:
        """cross (gram + ridge mean(diag) I)^-1, the best change of the weight (hidden, n)."""
        if math.isinf(ridge) or not self.gram.any():
            return torch.zeros_like(self.cross)
        damped = self.gram.clone()
        damped.diagonal().add_(ridge * self.gram.diagonal().mean())
        return torch.cholesky_solve(self.cross.mT, torch.linalg.cholesky(damped)).mT


def _add_up(
    pruned: LayerwiseModel,
    unpruned: LayerwiseModel,
    index: int,
    projection: str,
    *,
    first_held_out: int,
) -> tuple[_Sums, _Sums]:
    """One pass through a layer: sums over most of the text, and over the batches held out."""
    hidden, inputs = pruned.layers[index].get_submodule(projection).weight.shape
    most, held_out = (_Sums.zeros(inputs, hidden, pruned.device) for _ in range(2))
    for batch in range(len(pruned.states)):
        if projection == DOWN_PROJ:  # the unpruned model has run through this layer
            target = wide(unpruned.next[batch]).reshape(-1, hidden)
        else:
            _, target = observe(unpruned, index, batch, projection)
        X, stream = observe(pruned, index, batch, projection)
        sums = most if batch < first_held_out else held_out
        for part, what in (
            (X, f"what enters {projection} of {pruned.source.place}"),
            (target, f"the residual stream of {unpruned.source.place}"),
            (stream, f"the residual stream of {pruned.source.place}"),
        ):
            if not part.isfinite().all():
                raise InputError(f"refit, layer {index}: NaN or infinity in {what}")
        sums.add(X, target - stream)
    return most, held_out


def _fit(
    name: str, old: Tensor, most: _Sums, held_out: _Sums, ridges: Sequence[float]
) -> tuple[Tensor, Fit]:
    """The new weight in the old one's type, or the old one if rounding leaves nothing gained."""
    before = old.to(most.gram.device, torch.float64)
    total = most + held_out
    ridge = min(ridges, key=lambda ridge: held_out.error(most.solve(ridge)))
    new = (before + total.solve(ridge)).to(old.dtype)
    error = total.error(new.double() - before)
    if not error < float(total.square):
        new, ridge, error = old, math.inf, float(total.square)
    return new.cpu(), Fit(name, ridge, error / float(total.square) if total.square else 1.0)


def check_cut_from(student: Checkpoint | Loaded, teacher: Checkpoint | Loaded) -> None:
    """An error unless a model has fewer channels than another and the same embeddings, which
    nothing here changes, and names it in its record if it has one."""
    student.check_narrower(teacher)
    on_disk = isinstance(student, Checkpoint) and isinstance(teacher, Checkpoint)
    bases = Record.read(student.place).bases if on_disk else []
    ours, theirs = embedding(student), embedding(teacher)
    if not torch.equal(ours, theirs.to(ours.dtype)):  # slicing may have rounded it
        raise student.not_cut_from(teacher, "their embeddings differ")
    if bases and teacher.digest() not in bases:
        others = ", ".join(base[:12] for base in bases)
        raise student.not_cut_from(teacher, f"{FILE} names others, {others}")
