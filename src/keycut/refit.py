"""Refit: the projection behind each pruned mixer, fitted again by least squares.

Cutting key channels changes what a delta rule puts out, and the projection behind it was made for
the old output. It is linear, so its best new value has a closed form. Layer by layer, everything
before it refitted already, over the tokens of a text:

    X    (tokens, n)       what enters the projection in the pruned model
    E    (tokens, hidden)  the residual stream behind the mixer: the unpruned model's, less the
                           pruned one's
    W <- W + E^T X (X^T X + ridge mean(diag X^T X) I)^-1

which shrinks towards the old W. The ridge of each layer is the one whose solution on most of the
text has the smallest error on the rest of it; infinity, the old W, is among them.

Both models go through the text layer by layer, so that only one layer of each is in memory: once
through the unpruned model and twice through the pruned one, whatever the number of layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from keycut.artefact import atomic_write, to_json
from keycut.errors import InputError
from keycut.models.checkpoint import (
    WEIGHTS,
    Checkpoint,
    copy_companions,
    unfilled,
    with_current_names,
)
from keycut.models.delta_rule import wide
from keycut.models.layerwise import LayerwiseModel

logger = logging.getLogger(__name__)

RIDGES = (math.inf, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Of these the best is taken, the first of equals."""
HELD_OUT = 8  # one sequence of so many chooses the ridge
DOWN_PROJ = "mlp.down_proj"


@dataclass(frozen=True)
class LayerFit:
    """How a projection was fitted. Errors are sums of squares, relative to the old weights'."""

    name: str  # of the tensor
    ridge: float
    error: float  # on all text
    held_out: float  # on the part that chose the ridge, by the solution on the rest
    damage: float
    """The old weights' error, relative to the sum of squares of the unpruned model's stream."""
    elsewhere: tuple[float, ...] = ()  # on other texts, which decide nothing


@dataclass(frozen=True)
class Refit:
    """The new weights by name, in the type of the old ones, and how they came about."""

    weights: dict[str, Tensor]
    layers: tuple[LayerFit, ...]
    tokens: int


def refit(
    student: Checkpoint, teacher: Checkpoint, ids: Tensor, *, device: str = "cpu", batch: int = 8
) -> Refit:
    """Fit the projections of a pruned model to the model it was cut from.

    `ids` (sequences, length) is the text; `batch` sequences of it are run at a time.
    """
    if student.shape.width >= teacher.shape.width:
        raise InputError(
            f"{student.folder} has {student.shape.width} key channels a head and {teacher.folder} "
            f"{teacher.shape.width}: nothing was cut, so there is nothing to refit"
        )
    sequences, length = ids.shape
    check_refit(student, sequences=sequences, length=length)
    held_out = torch.arange(sequences) % HELD_OUT == 0
    return _refit(student, teacher, ids[~held_out], ids[held_out], device=device, batch=batch)


def check_refit(checkpoint: Checkpoint, *, sequences: int, length: int) -> None:
    """An error if the model, pruned or not, cannot be refitted on so much text."""
    checkpoint.check_no_softmax()
    if checkpoint.config.get("attnres_block_size") is not None:
        raise InputError(
            f"{checkpoint.folder}: attnres_block_size is set: its layers read more than the "
            "residual stream, which refit does not carry"
        )
    if sequences < 2:
        raise InputError(f"refit: {sequences} sequence of text; give at least 2, one is held out")
    tokens = (sequences - math.ceil(sequences / HELD_OUT)) * length
    inputs = checkpoint.shape.value_heads * checkpoint.shape.value_width
    if tokens < inputs:
        raise InputError(
            f"refit: {tokens:,} tokens of text for the {inputs:,} unknowns that each output "
            f"of {checkpoint.architecture.o_proj} has; give at least as many, better ten times that"
        )


def perplexity(
    checkpoint: Checkpoint, ids: Tensor, *, device: str = "cpu", batch: int = 8
) -> float:
    """Of text (sequences, length), with one layer of the model in memory at a time."""
    dtype = _compute_dtype(checkpoint, device)
    with torch.no_grad():
        stream = LayerwiseModel(checkpoint, ids.split(batch), device, dtype)
        for index in range(len(stream.layers)):
            with stream.filled(index):
                stream.run_all(index)
            stream.step()
        head = "lm_head.weight"
        tied = head not in stream.expected
        weight = _embedding(checkpoint) if tied else checkpoint.tensor(checkpoint.stored[head])
        weight = weight.to(device, dtype)
        # A sequence at a time: the logits are by far the largest tensor.
        losses = [
            F.cross_entropy(
                F.linear(stream.decoder.norm(hidden[:-1]), weight).float(), targets[1:].to(device),
                reduction="sum",
            )
            for hidden, targets in zip(torch.cat(stream.states), ids, strict=True)
        ]  # fmt: skip
    mean = torch.stack(losses).double().sum() / ids[:, 1:].numel()
    return mean.exp().item()


def write_refitted(
    student: Checkpoint, result: Refit, out: Path | str, *, card: str | None = None,
    force: bool = False,
) -> None:  # fmt: skip
    """The pruned model with its new weights, as a folder of the same shapes and types."""
    with atomic_write(out, force=force, folder=True) as aside:
        tensors = {**with_current_names(student.tensors(), student.architecture), **result.weights}
        tensors = {student.architecture.stored_name(n): t for n, t in tensors.items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / "config.json").write_text(to_json(student.config))
        copy_companions(student.folder, aside)
        if card is not None:
            (aside / "README.md").write_text(card)


# What a projection meets


@dataclass(frozen=True)
class _Pass:
    """What one batch met in a layer: (B, T, ...)."""

    inputs: Tensor  # of the projection
    output: Tensor  # of the projection
    stream: Tensor  # the residual stream, to which the output is added


def _observe(stream: LayerwiseModel, index: int, batch: int, projection: str) -> _Pass:
    """One batch through a filled layer, and what a projection in the layer met."""
    captured: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        captured.extend([args[0], output])

    hook = stream.layers[index].get_submodule(projection).register_forward_hook(keep)
    try:
        stream.run(index, batch)
    finally:
        hook.remove()
    inputs, output = captured
    before, after = stream.states[batch], stream.next[batch]
    return _Pass(inputs, output, after - output if projection == DOWN_PROJ else before)


# Least squares from sums


@dataclass
class _Sums:
    """Over the rows of X, E: what least squares needs of them, in float64."""

    gram: Tensor  # X^T X, (n, n)
    cross: Tensor  # E^T X, (hidden, n)
    square: Tensor  # of E
    size: Tensor  # the square of the stream that E is a difference of
    rule: Tensor | None = None  # (X of the teacher - X)^T X, for ways that fit the heads apart

    @classmethod
    def zeros(cls, inputs: int, outputs: int, device: str) -> _Sums:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        return cls(zeros(inputs, inputs), zeros(outputs, inputs), zeros(()), zeros(()))

    def add(self, X: Tensor, E: Tensor, size: Tensor, rule: Tensor | None = None) -> None:
        """X: (rows, n), E: (rows, hidden), float32 or wider."""
        self.gram += X.mT @ X
        self.cross += E.mT @ X
        self.square += E.square().sum(dtype=torch.float64)
        self.size += size.square().sum(dtype=torch.float64)
        if rule is not None:
            product = (rule.mT @ X).double()
            self.rule = product if self.rule is None else self.rule + product

    def __add__(self, other: _Sums) -> _Sums:
        rule = None if self.rule is None or other.rule is None else self.rule + other.rule
        return _Sums(
            self.gram + other.gram, self.cross + other.cross, self.square + other.square,
            self.size + other.size, rule,
        )  # fmt: skip

    def error(self, D: Tensor) -> float:
        """|E - X D^T|^2 for a change D (hidden, n) of the weight."""
        change = torch.sum((D @ self.gram - 2 * self.cross) * D)
        return float(self.square + change)

    def solve(self, cross: Tensor, ridge: float) -> Tensor:
        """cross (gram + ridge mean(diag) I)^-1."""
        if math.isinf(ridge):
            return torch.zeros_like(cross)
        damped = self.gram + ridge * self.gram.diagonal().mean() * torch.eye(
            len(self.gram), dtype=torch.float64, device=self.gram.device
        )
        return torch.cholesky_solve(cross.mT, torch.linalg.cholesky(damped)).mT


# What a way of fitting consists of


Target = Callable[[_Pass, _Pass], Tensor]
Solver = Callable[[_Sums, _Sums, Tensor], tuple[Tensor, float, float]]
"""Sums over most rows, over the rows held out, and the old weight, to its change on all rows, the
ridge, and the error on the rows held out of the change on the others."""
RowWeights = Callable[[_Pass, int, int], Tensor]
"""What the rows of X and E are multiplied by, (B, T, 1): from the teacher's pass, for a layer and a
batch by their numbers."""


def _stream_difference(teacher: _Pass, student: _Pass, *, drift: float = 1.0) -> Tensor:
    """E: of what the projections put out, and of what the streams had drifted apart before."""
    difference = wide(teacher.output) - wide(student.output)
    return difference + drift * (wide(teacher.stream) - wide(student.stream))


def _relative(teacher: _Pass, layer: int, batch: int) -> Tensor:
    """Rows in proportion to the stream: the norms behind it see the stream at length one."""
    stream = wide(teacher.stream) + wide(teacher.output)
    return stream.square().mean(-1, keepdim=True).rsqrt()


def _ridge(
    most: _Sums, held_out: _Sums, weight: Tensor, *, ridges: Sequence[float] = RIDGES,
    also_held_out: bool = True,
) -> tuple[Tensor, float, float]:  # fmt: skip
    """`also_held_out`: fit on those rows, too, once they have chosen the ridge."""
    errors = {ridge: held_out.error(most.solve(most.cross, ridge)) for ridge in ridges}
    best = min(errors, key=errors.__getitem__)
    rows = most + held_out if also_held_out else most
    return rows.solve(rows.cross, best), best, errors[best]


def _low_rank(
    most: _Sums, held_out: _Sums, weight: Tensor, *, ridges: Sequence[float] = RIDGES,
    shares: Sequence[float] = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1),
) -> tuple[Tensor, float, float]:  # fmt: skip
    """Only the strongest directions of what the change adds to the stream; how many is chosen on
    the rows held out, too."""

    def directions(sums: _Sums, D: Tensor) -> Tensor:
        return torch.linalg.eigh(D @ sums.gram @ D.mT).eigenvectors.flip(-1)

    def truncated(D: Tensor, U: Tensor, share: float) -> Tensor:
        U = U[:, : max(1, round(share * len(D)))]
        return U @ (U.mT @ D)

    errors: dict[tuple[float, float], float] = {}
    for ridge in ridges:
        D = most.solve(most.cross, ridge)
        U = directions(most, D)
        errors |= {(ridge, s): held_out.error(truncated(D, U, s)) for s in shares}
    ridge, share = best = min(errors, key=errors.__getitem__)
    total = most + held_out
    D = total.solve(total.cross, ridge)
    return truncated(D, directions(total, D), share), ridge, errors[best]


def _heads_apart(
    most: _Sums, held_out: _Sums, weight: Tensor, *, heads: int, ridges: Sequence[float] = RIDGES
) -> tuple[Tensor, float, float]:
    """Each head's output to the teacher's by a matrix of its own, in front of the old weight."""

    def change(sums: _Sums, ridge: float) -> Tensor:
        assert sums.rule is not None, "`rule` of the way is not set"
        width = len(sums.gram) // heads
        blocks = []
        for start in range(0, len(sums.gram), width):
            part = slice(start, start + width)
            head = _Sums(sums.gram[part, part], sums.cross, sums.square, sums.size)
            blocks.append(head.solve(sums.rule[part, part], ridge))
        return weight @ torch.block_diag(*blocks)

    errors = {ridge: held_out.error(change(most, ridge)) for ridge in ridges}
    best = min(errors, key=errors.__getitem__)
    return change(most + held_out, best), best, errors[best]


@dataclass(frozen=True)
class _Way:
    """How a layer is fitted: what experiments vary. `refit` takes it as it is here."""

    target: Target = _stream_difference
    solve: Solver = _ridge
    row_weights: RowWeights | None = None
    rule: bool = False  # whether the solver fits the output of the rule
    down_proj: bool = False  # fit the MLP's second matrix, too


DEFAULT = _Way()


# Layer by layer


def _refit(
    student: Checkpoint, teacher: Checkpoint, text: Tensor, held_out: Tensor, *, device: str,
    batch: int, way: _Way = DEFAULT, elsewhere: Sequence[Tensor] = (),
) -> Refit:  # fmt: skip
    """`text` is what is fitted on, `held_out` chooses the ridge and is then fitted on, too. On
    texts `elsewhere` the error is computed, and nothing else."""
    kind, shape = student.architecture, student.shape
    check_cut_from(student, teacher)
    parts = [
        (part, ids) for part, t in enumerate((text, held_out, *elsewhere)) for ids in t.split(batch)
    ]
    texts = [ids for _, ids in parts]
    dtype = _compute_dtype(student, device)
    _, mixer = kind.mixer.split("{layer}.")
    projections = [mixer + kind.o_proj.removesuffix(".weight")]
    projections += [DOWN_PROJ] if way.down_proj else []
    weights: dict[str, Tensor] = {}
    fits: list[LayerFit] = []
    with torch.no_grad(), _float32_products():
        pruned = LayerwiseModel(student, texts, device, dtype)
        whole = LayerwiseModel(teacher, texts, device, dtype)
        for index in range(len(pruned.layers)):
            with pruned.filled(index) as layer, whole.filled(index) as whole_layer:
                if way.down_proj:  # a fused one is no call of the module
                    layer.mlp.fuse_swiglu = whole_layer.mlp.fuse_swiglu = False
                for projection in projections if index in shape.layers else []:
                    name = f"{pruned.prefix}{index}.{projection}.weight"
                    old = student.tensor(student.stored[name])
                    sums = _add_up(pruned, whole, index, projection, [p for p, _ in parts], way)
                    new, fit = _fit(name, old, sums, way)
                    weights[name] = new
                    fits.append(fit)
                    layer.get_submodule(projection).weight.copy_(new)
                    logger.info(
                        "refit: layer %d of %d, ridge %g, error %.3f of the old weights'",
                        index + 1, len(pruned.layers), fit.ridge, fit.error,
                    )  # fmt: skip
                if index not in shape.layers:
                    whole.run_all(index)
                pruned.run_all(index)
            pruned.step()
            whole.step()
    return Refit(weights, tuple(fits), text.numel() + held_out.numel())


def _compute_dtype(checkpoint: Checkpoint, device: str) -> torch.dtype:
    """A CPU computes in float32 what is stored in 16 bits."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16
    return torch.float64 if checkpoint.dtype == "float64" else torch.float32


@contextmanager
def _float32_products() -> Iterator[None]:
    """No TF32, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _embedding(checkpoint: Checkpoint) -> Tensor:
    """As it is stored."""
    model, _, _ = unfilled(checkpoint)
    weight = model.get_input_embeddings().weight
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    return checkpoint.tensor(checkpoint.stored[name])


def check_cut_from(student: Checkpoint, teacher: Checkpoint) -> None:
    """An error unless all tensors but those over key channels have the same names and shapes, and
    the embeddings, which nothing here changes, the same numbers."""
    if student.architecture is not teacher.architecture:
        raise InputError(
            f"{teacher.folder} is not the model that {student.folder} was cut from: a "
            f"{teacher.architecture.model_type}, not a {student.architecture.model_type}"
        )
    over_keys = student.architecture.key_tensors(student.shape)
    shapes = [
        {
            name: list(t.shape)
            for name, t in with_current_names(c.headers(), c.architecture).items()
            if name not in over_keys
        }
        for c in (student, teacher)
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        mine, theirs = (part.get(name) for part in shapes)
        if mine != theirs:
            raise InputError(
                f"{teacher.folder} is not the model that {student.folder} was cut from: {name} is "
                f"{theirs or 'absent'} there and {mine or 'absent'} here"
            )
    ours = _embedding(student)
    if not torch.equal(ours, _embedding(teacher).to(ours.dtype)):  # slicing may have rounded it
        raise InputError(
            f"{teacher.folder} is not the model that {student.folder} was cut from: their "
            "embeddings differ"
        )


def _add_up(
    pruned: LayerwiseModel,
    whole: LayerwiseModel,
    index: int,
    projection: str,
    parts: Sequence[int],
    way: _Way,
) -> list[_Sums]:
    """One pass of both models through a layer: sums over each part of the text."""
    hidden, inputs = pruned.layers[index].get_submodule(projection).weight.shape
    sums = [_Sums.zeros(inputs, hidden, pruned.device) for _ in range(max(parts) + 1)]
    for batch, part in enumerate(parts):
        theirs = _observe(whole, index, batch, projection)
        mine = _observe(pruned, index, batch, projection)
        X, E = wide(mine.inputs), way.target(theirs, mine)
        size = wide(theirs.stream) + wide(theirs.output)
        rule = wide(theirs.inputs) - X if way.rule else None
        rows = [X, E, size] if rule is None else [X, E, size, rule]
        if way.row_weights is not None:
            weights = way.row_weights(theirs, index, batch)
            rows = [x * weights for x in rows]
        sums[part].add(*(x.flatten(0, 1) for x in rows))
    for values, what in (
        ([s.gram for s in sums], f"what enters {projection} of {pruned.checkpoint.folder}"),
        ([s.size for s in sums], f"the residual stream of {whole.checkpoint.folder}"),
        ([s.cross for s in sums], f"the residual stream of {pruned.checkpoint.folder}"),
    ):
        if not torch.stack(values).isfinite().all():
            raise InputError(f"refit, layer {index}: NaN or infinity in {what}")
    return sums


def _fit(name: str, old: Tensor, sums: Sequence[_Sums], way: _Way) -> tuple[Tensor, LayerFit]:
    """The new weight in the old one's type, or the old one if rounding leaves nothing gained."""
    before = old.to(sums[0].gram.device, torch.float64)
    total = sums[0] + sums[1]
    D, ridge, held_out = way.solve(sums[0], sums[1], before)
    new = (before + D).to(old.dtype)
    error = total.error(new.double() - before)
    if not error < float(total.square):
        new, ridge = old, math.inf
        error, held_out = float(total.square), float(sums[1].square)
    fit = LayerFit(
        name, ridge, error=_share(error, total.square), held_out=_share(held_out, sums[1].square),
        damage=_share(float(total.square), total.size),
        elsewhere=tuple(_share(s.error(new.to(before) - before), s.square) for s in sums[2:]),
    )  # fmt: skip
    return new.cpu(), fit


def _share(part: float, of: Tensor) -> float:
    return part / float(of) if of > 0 else 1.0
