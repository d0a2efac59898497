"""Calibration: one streaming pass over text that gives every method all it needs of a model.

Per layer and head, with N tokens and keys and queries taken where the delta rule receives them:

    input_norm       (layers, hidden)           ||X_:i||_2 of each input feature of the projections
    gram.<k|q>.<raw|normalised>  (layers, heads, d_k, d_k)   sum over all tokens of k k^T, q q^T
    sample.<k|q>.<raw|normalised>                the same over the paper's random sample of tokens
    saliency.<q|k>   (layers, heads, d_k)        sum_i |W_ij dL/dW_ij|, L the language-model loss
    fisher.<q|k>     (layers, heads, d_k)        mean over tokens t of (k_tj dL_s/dk_tj)^2, L_s the
                                                 sum of the losses of a batch

and with `values`, of what enters the output projection, after norm and gate:

    gram.v.raw, sample.v.raw    (layers, value heads, d_v, d_v)
    fisher.v                    (layers, value heads, d_v)

[K; Q]^T [K; Q] is the sum of two Gram matrices, the second moment one of them over N, and an R
factor a Cholesky factor of one: so nothing larger than d_k x d_k per head is kept, however long
the text. Sums are float64; gradients are added up in float32 under bf16 weights.

Saliency and fisher need gradients, and so all of a model at once. For the rest one layer of it is
held in memory, and the hidden states of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from statecut.data.packing import PackedTokens
from statecut.data.progress import Progress
from statecut.errors import InputError
from statecut.files import atomic_write, read_json, sha256, to_json
from statecut.models.architectures.base import Architecture, ChannelTensor
from statecut.models.capture import capture_rule_inputs, mixers
from statecut.models.checkpoint import Checkpoint, load, read_tensors
from statecut.models.delta_rule import l2_normalised
from statecut.models.kernels import check_gradients
from statecut.models.layerwise import LayerwiseModel
from statecut.models.loaded import Loaded
from statecut.models.shapes import MixerShape
from statecut.pruning.activations import Activations, Rows, Side
from statecut.version import __version__

TENSORS = "calibration.safetensors"
MANIFEST = "manifest.json"


@dataclass(frozen=True, repr=False)
class Calibration:
    """What one pass found, and what it was of."""

    tensors: dict[str, Tensor]
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        return f"Calibration({self.manifest['tokens']:,} tokens: {', '.join(self.tensors)})"

    def gram(self, side: Side, rows: Rows, activations: Activations) -> Tensor:
        """(layers, heads, d_k, d_k), float64; of values (layers, value heads, d_v, d_v)."""
        return self.tensors[f"{'gram' if rows == 'all' else 'sample'}.{side}.{activations}"]

    def save(self, folder: Path | str, *, force: bool = False) -> None:
        with atomic_write(folder, force=force, folder=True) as aside:
            save_file(self.tensors, aside / TENSORS)
            manifest = {**self.manifest, "sha256": sha256(aside / TENSORS)}
            (aside / MANIFEST).write_text(to_json(manifest))

    @classmethod
    def load(cls, folder: Path | str) -> Calibration:
        manifest = read_json(Path(folder) / MANIFEST)
        if sha256(Path(folder) / TENSORS) != manifest["sha256"]:
            raise InputError(f"{folder}/{TENSORS} is not the file its manifest describes")
        return cls(dict(read_tensors(Path(folder) / TENSORS)), manifest)


def sampled_positions(tokens: int, rows: int, seed: int) -> np.ndarray:
    """The sorted places of `rows` tokens out of `tokens`, without repetition; all if fewer."""
    generator = np.random.default_rng(seed)
    return np.sort(generator.choice(tokens, size=min(rows, tokens), replace=False))


class _Sums:
    """Everything that is added up while batches of token ids (B, T) are run."""

    def __init__(
        self,
        model: Any,
        batches: Sequence[Tensor],
        device: torch.device | str,
        *,
        sample_rows: int,
        seed: int,
        values: bool,
    ):
        adapter, self.shape, mixer_modules = mixers(model)
        layers = len(self.shape.layers)
        q_proj = mixer_modules[0].get_parameter(adapter.q_proj.name)
        hidden = q_proj.movedim(adapter.q_proj.axis, 0).shape[1]
        self.device, self.seed = device, seed
        self.first: list[int] = np.cumsum([0, *(ids.numel() for ids in batches)]).tolist()
        self.tokens = self.first[-1]
        self.positions = sampled_positions(self.tokens, sample_rows, seed)
        self.sampled = torch.empty(0, dtype=torch.long)
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.squares = zeros(layers, hidden)
        size = {"k": self.shape.size("key"), "q": self.shape.size("key")}
        size |= {"v": self.shape.size("value")} if values else {}
        self.fisher = {side: zeros(layers, *size[side]) for side in size}
        self.grams = {
            f"{rows}.{side}.{activations}": zeros(layers, *size[side], size[side][1])
            for rows in ("gram", "sample")
            for side in size
            for activations in (("raw",) if side == "v" else ("raw", "normalised"))
        }

    def start_batch(self, number: int) -> None:
        """What is added next belongs to this batch."""
        first, end = self.first[number : number + 2]
        low, high = np.searchsorted(self.positions, [first, end])
        self.sampled = torch.from_numpy(self.positions[low:high] - first).to(self.device)

    def add_rule(self, layer: int, arguments: dict[str, Any]) -> None:
        for side in ("k", "q"):
            x = arguments[side]  # (B, T, heads, d_k)
            raw = x.detach().flatten(0, 1).transpose(0, 1).double()  # (heads, tokens, d_k)
            self._add_gram(layer, f"{side}.raw", raw)
            self._add_gram(layer, f"{side}.normalised", l2_normalised(raw))

    def add_inputs(self, layer: int, x: Tensor) -> None:
        """x: (B, T, hidden)."""
        self.squares[layer] += x.detach().reshape(-1, x.shape[-1]).double().square().sum(0)

    def add_output(self, layer: int, x: Tensor) -> None:
        """x: (B, T, value heads, d_v)."""
        self._add_gram(layer, "v.raw", x.detach().flatten(0, 1).transpose(0, 1).double())

    def _add_gram(self, layer: int, name: str, rows: Tensor) -> None:
        """rows: (heads, tokens, width)."""
        self.grams[f"gram.{name}"][layer] += rows.mT @ rows
        if len(self.sampled):
            sample = rows[:, self.sampled]
            self.grams[f"sample.{name}"][layer] += sample.mT @ sample

    def add_gradient(self, layer: int, side: str, x: Tensor, gradient: Tensor) -> None:
        """Both: (B, T, heads, d_k). The gradient is that of the mean loss of the batch."""
        losses = x.shape[0] * (x.shape[1] - 1)  # the last token of a sequence predicts none
        terms = x.double() * gradient.double() * losses
        self.fisher[side][layer] += terms.square().sum((0, 1))

    def calibration(self, more: dict[str, Tensor], about: dict[str, Any]) -> Calibration:
        """With tensors and facts that are not added up here; NaN or infinity is an error."""
        tensors = {"input_norm": self.squares.sqrt(), **self.grams, **more}
        check_finite(tensors, self.shape)
        device = torch.device(self.device)
        manifest = {
            "statecut": __version__,
            "tokens": self.tokens,
            "seed": self.seed,
            "sample_rows": len(self.positions),
            "layers": list(self.shape.layers),
            "heads": self.shape.heads,
            "width": self.shape.width,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            **about,
        }
        return Calibration({name: t.cpu().contiguous() for name, t in tensors.items()}, manifest)


class _Saliency:
    """sum_i |W_ij dL/dW_ij| of the query and key projections, L the loss of all tokens."""

    def __init__(self, adapter: Architecture, shape: MixerShape, mixers: list[Any]):
        self.shape = shape
        self.projections: dict[Side, ChannelTensor] = {"q": adapter.q_proj, "k": adapter.k_proj}
        # One matrix may be the projection of both.
        names = dict.fromkeys(projection.name for projection in self.projections.values())
        self.weights = {name: [m.get_parameter(name) for m in mixers] for name in names}
        self.parameters = [weight for weights in self.weights.values() for weight in weights]
        self.gradients = {W: torch.zeros_like(W, dtype=torch.float32) for W in self.parameters}

    def add(self, tokens: int) -> None:
        """The gradients of a batch: its loss is a mean, so they are weighed by its tokens."""
        for weight in self.parameters:
            self.gradients[weight] += weight.grad.float() * tokens
            weight.grad = None

    def scores(self, side: Side, tokens: int) -> Tensor:
        """(layers, heads, d_k)."""
        key = self.projections[side]
        (rows,) = torch.from_numpy(key.places(self.shape))
        products = [W.detach().float() * self.gradients[W] / tokens for W in self.weights[key.name]]
        return torch.stack([p.abs().double().movedim(key.axis, 0).sum(1)[rows] for p in products])


@contextmanager
def _gradients_only_for(model: Any, parameters: list[Tensor]) -> Iterator[None]:
    """The model in evaluation mode, with gradients of these parameters; then as it was."""
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    was_training = model.training
    model.eval().requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, value in required.items():
            parameter.requires_grad_(value)
            parameter.grad = None
        model.train(was_training)


def calibrate(
    source: Checkpoint | Loaded,
    batches: Sequence[Tensor],
    *,
    gradients: bool = True,
    device: str = "cpu",
    sample_rows: int = 5000,
    seed: int = 0,
    values: bool = False,
    provenance: dict[str, Any] | None = None,
) -> Calibration:
    """One pass of a model over `batches` of token ids (B, T), forward and backward.

    Without gradients there is no loss, and one layer of a model on disk is in memory at a time.
    With `values` there is what it takes to choose value channels, too. `provenance` goes into the
    manifest: where the text is from.
    """
    about = {"model_digest": source.digest(), **(provenance or {})}
    dtype = source.compute_dtype(device)
    if gradients:
        check_gradients(device)
        if isinstance(source, Loaded):
            model = source.model
        else:
            model = load(source.folder, device=device, dtype=dtype)
    else:
        source.check_runs()
        stream = LayerwiseModel(source, batches, device, dtype)
        model = stream.model
    sums = _Sums(model, batches, device, sample_rows=sample_rows, seed=seed, values=values)
    on_output = sums.add_output if values else None
    capture = capture_rule_inputs(
        model, sums.add_rule, sums.add_inputs, sums.add_gradient, on_output
    )
    with capture:
        if not gradients:
            _run_layers(stream, sums)
            return sums.calibration({}, about)
        tensors, loss = _run_backward(model, batches, sums)
    return sums.calibration(tensors, {"loss": loss, **about})


def _run_backward(
    model: Any, batches: Sequence[Tensor], sums: _Sums
) -> tuple[dict[str, Tensor], float]:
    """What is known of gradients, and the loss."""
    saliency = _Saliency(*mixers(model))
    progress = Progress("calibrating", tokens=sums.tokens)
    loss_sum = 0.0
    with _gradients_only_for(model, saliency.parameters):
        for number, batch in enumerate(batches):
            ids = batch.to(sums.device)
            sums.start_batch(number)
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            saliency.add(ids.numel())
            loss_sum += loss.item() * ids.numel()
            progress.add(tokens=ids.numel())
    tensors = {f"saliency.{s}": saliency.scores(s, sums.tokens) for s in saliency.projections}
    tensors |= {f"fisher.{s}": total / sums.tokens for s, total in sums.fisher.items()}
    return tensors, loss_sum / sums.tokens


@torch.no_grad()
def _run_layers(stream: LayerwiseModel, sums: _Sums) -> None:
    layers = len(stream.layers)
    progress = Progress("calibrating", tokens=sums.tokens * layers)
    for index in range(layers):
        with stream.filled(index):
            for number, batch in enumerate(stream.batches):
                sums.start_batch(number)
                stream.run(index, number)
                progress.add(tokens=batch.numel(), note=f"layer {index + 1} of {layers}")
        stream.step()


def check_finite(tensors: dict[str, Tensor], shape: MixerShape) -> None:
    """NaN or infinity anywhere is an error naming the layer where it came up and, where there is
    one, the head. All that is computed after that has it too: later layers, then the gradients,
    from the last layer to the first."""
    bad = []
    for name, tensor in tensors.items():
        is_gradient = name.startswith(("saliency.", "fisher."))
        by_head = (~tensor.isfinite()).flatten(min(tensor.ndim - 1, 2)).any(-1)
        for index, *heads in by_head.nonzero().tolist():
            bad.append(((is_gradient, -index if is_gradient else index), name, index, heads))
    if not bad:
        return
    _, name, index, heads = min(bad, key=itemgetter(0))
    layer = shape.layers[index]
    if name == "input_norm":  # it came up in between, which may be in the layer before
        before = f", and what enters layer {shape.layers[index - 1]} has none" if index else ""
        raise InputError(f"what enters layer {layer} has NaN or infinity{before}")
    head = f", head {heads[0]}" if heads else ""
    raise InputError(f"layer {layer}{head}: {name} has NaN or infinity")


def sampled_sequences(data: PackedTokens, sequences: int, seed: int) -> Tensor:
    """Token ids (sequences, length), sampled from packed text."""
    positions = sampled_positions(len(data), sequences, seed)
    return torch.from_numpy(np.stack([data[i] for i in positions]))


def calibrate_folder(
    folder: Path | str,
    data: PackedTokens,
    *,
    name: str,
    sequences: int,
    rows: int,
    seed: int,
    device: str,
    batch: int = 8,
    gradients: bool = True,
    values: bool = False,
) -> Calibration:
    """The calibration of a model in a folder, on sequences sampled from packed text.

    `name` is that of the text, and `rows` the size of the sample.
    """
    if sequences > len(data):
        raise InputError(f"{name}: has {len(data)} sequences, {sequences} are needed")
    source = data.manifest.source
    return calibrate(
        Checkpoint(folder),
        sampled_sequences(data, sequences, seed).split(batch),
        gradients=gradients,
        device=device,
        sample_rows=rows,
        seed=seed,
        values=values,
        provenance={
            "text": {"source": source.name, "revision": source.revision},
            "sequences_of": {"data": name, "sha256": data.manifest.sha256},
        },
    )
