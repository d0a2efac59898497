"""From a method's function to selections of key or value channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from statecut.arguments import Target
from statecut.errors import InputError
from statecut.models.shapes import Channels
from statecut.pruning.activations import Side
from statecut.pruning.method import Method
from statecut.pruning.methods import method_named
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import check_sliceable
from statecut.pruning.statistics import ModelStatistics
from statecut.version import __version__


def select(
    name: str,
    model: ModelStatistics,
    widths: Sequence[int],
    *,
    channels: Channels = "key",
    target: Target | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Selection]:
    """One selection for each width, by a method and its options; what the widths share is computed
    once. The target, which value channels do not have, is the method's own unless it is given."""
    method = method_named(name)
    side: Side = "k" if channels == "key" else "v"
    options = method.options(options) | ({"seed": seed} if "seed" in method.needs else {})
    _, full = model.checkpoint.shape.size(channels)
    about: dict[str, Any] = {"method": name, "full_width": full, **options}
    judged_by: Target | Literal["v"] = "v"
    if side == "k":
        judged_by = about["target"] = target or method.targets[0]
        method.check_target(judged_by)
    else:
        method.check_chooses_values(options)
        check_sliceable(model.checkpoint, values=True)
    facts: dict[str, Any] = {"statecut": __version__, "model_digest": model.checkpoint.digest()}
    if model.calibration:
        facts["calibration"] = model.calibration.manifest
        if model.calibration.manifest.get("model_digest") != facts["model_digest"]:
            raise InputError(
                f"the calibration was not made for {model.checkpoint.place}: calibrate it again"
            )
    selections = []
    for width, tensors in zip(
        widths, _choose(method, model, judged_by, widths, options), strict=True
    ):
        if side == "k":
            selections.append(Selection(tensors, {**about, **facts, "width": width}))
        else:
            tensors = {f"values.{fact}": tensor for fact, tensor in tensors.items()}
            selections.append(Selection(tensors, {**facts, "values": {**about, "width": width}}))
    return selections


def _choose(
    method: Method,
    model: ModelStatistics,
    target: Any,
    widths: Sequence[int],
    options: dict[str, Any],
) -> list[dict[str, Tensor]]:
    """For each width what the method gives."""
    if method.score:
        scores = method.score(model, target, **options)
        shape = model.checkpoint.shape
        expected = (len(shape.layers), *shape.size("value" if target == "v" else "key"))
        if scores.shape != expected or not scores.isfinite().all():
            raise InputError(
                f"method {method.name}: its scores are {tuple(scores.shape)}; expected finite "
                f"numbers, {expected}: layers, heads, channels"
            )
        return [{"kept": top(scores, width), "scores": scores} for width in widths]
    if method.choose:
        return method.choose(model, target, widths, **options)
    assert method.rotate
    rotation = method.rotate(model, target, **options)
    return [{"rotation": rotation[..., :width, :]} for width in widths]


def top(scores: Tensor, width: int) -> Tensor:
    """The `width` highest of (..., d_k), ascending by channel; of equals the lower channel."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :width].sort(-1).values
