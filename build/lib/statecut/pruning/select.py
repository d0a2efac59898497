"""From a method's function to selections: `select(method, model, widths)` of key channels, and
`select_values` of value channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from statecut import __version__
from statecut.arguments import Target
from statecut.errors import InputError
from statecut.models.shapes import Channels
from statecut.pruning.calibration import Calibration, Side
from statecut.pruning.conditioning import condition_number, effective_rank, spectrum_from_gram
from statecut.pruning.method import Method
from statecut.pruning.methods import METHODS, method_named
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import check_sliceable
from statecut.pruning.statistics import ModelStatistics


def select(
    name: str,
    model: ModelStatistics,
    widths: Sequence[int],
    *,
    target: Target | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Selection]:
    """One selection for each width, by a method and its options; the target is the method's own
    unless it is given. What the widths share is computed once."""
    method = method_named(name)
    target = target or method.targets[0]
    method.check_target(target)
    options = method.options(options) | ({"seed": seed} if "seed" in method.needs else {})
    check_inputs(method, model, widths, "key", options)
    about = {
        "method": method.name,
        "target": target,
        "full_width": model.checkpoint.shape.width,
        **options,
    }
    results = _choose(method, model, target, widths, options)
    return [
        Selection(tensors, {**about, **common_facts(model), "width": width})
        for tensors, width in zip(results, widths, strict=True)
    ]


def select_values(
    name: str, model: ModelStatistics, widths: Sequence[int], *, seed: int = 0, **options: Any
) -> list[Selection]:
    """The same for value channels, each value head by itself. `Selection.with_values` puts such a
    choice beside one of key channels."""
    method = method_named(name)
    options = method.options(options) | ({"seed": seed} if "seed" in method.needs else {})
    check_inputs(method, model, widths, "value", options)
    about = {"method": method.name, "full_width": model.checkpoint.shape.value_width, **options}
    results = _choose(method, model, "v", widths, options)
    return [
        Selection(
            {f"values.{fact}": tensor for fact, tensor in tensors.items()},
            {**common_facts(model), "values": {**about, "width": width}},
        )
        for tensors, width in zip(results, widths, strict=True)
    ]


def _choose(
    method: Method,
    model: ModelStatistics,
    target: Target | Literal["v"],
    widths: Sequence[int],
    options: dict[str, Any],
) -> list[dict[str, Tensor]]:
    """For each width what the method gives, and what there is to know of it."""
    if method.score:
        scores = method.score(model, target, **options)
        results = [{"kept": top(scores, width), "scores": scores} for width in widths]
    elif method.choose:
        results = method.choose(model, target, widths, **options)
    else:
        assert method.rotate
        results = [{"rotation": method.rotate(model, target, w, **options)} for w in widths]
    side: Side = "v" if target == "v" else "k"
    return [tensors | conditioning(model.calibration, side, tensors) for tensors in results]


def common_facts(model: ModelStatistics) -> dict[str, Any]:
    """Of a selection, whatever it is of."""
    calibration = model.calibration
    return {
        "statecut": __version__,
        "model_digest": model.checkpoint.digest(),
        **({"calibration": calibration.manifest} if calibration else {}),
    }


def check_chooses_values(method: Method, options: Mapping[str, Any]) -> None:
    """An error if a method, with these options, cannot choose value channels."""
    if not method.values:
        others = ", ".join(other.name for other in METHODS.values() if other.values)
        raise InputError(f"method {method.name} chooses no value channels; {others} do")
    if options.get("activations") == "normalised":
        raise InputError("activations normalised: values have no L2 norm; take raw")


def check_inputs(
    method: Method,
    model: ModelStatistics,
    widths: Sequence[int],
    channels: Channels,
    options: Mapping[str, Any],
) -> None:
    """Everything that can be known to be wrong before the work starts."""
    _, full = model.checkpoint.shape.size(channels)
    for width in widths:
        if not 1 <= width <= full:
            of = "values of " if channels == "value" else ""
            raise InputError(
                f"a width of {width} for {of}{model.checkpoint.folder}: must lie in 1..{full}"
            )
    if channels == "value":
        check_chooses_values(method, options)
        check_sliceable(model.checkpoint, values=True)
    if model.calibration is None:
        if "text" in method.needs:
            raise InputError(f"method {method.name} needs a calibration, and none was given")
        return
    if "gradients" in method.needs and "saliency.k" not in model.calibration.tensors:
        raise InputError(f"method {method.name} needs gradients, and this calibration has none")
    measured = channels == "key" or "gram.v.raw" in model.calibration.tensors
    if "text" in method.needs and not measured:
        raise InputError(
            "this calibration has nothing of values: calibrate with `values=True` to choose them"
        )
    calibrated = model.calibration.manifest.get("model_digest")
    if calibrated != (digest := model.checkpoint.digest()):
        raise InputError(
            f"the calibration was made for the model {str(calibrated)[:12]}, but "
            f"{model.checkpoint.folder} is {digest[:12]}: calibrate it again"
        )


def top(scores: Tensor, width: int) -> Tensor:
    """The `width` highest of (..., d_k), ascending by channel; of equals the lower channel."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :width].sort(-1).values


def conditioning(
    calibration: Calibration | None, side: Side, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """How well the keys span before and after, or what enters the output projection, where there is
    a calibration to tell."""
    if calibration is None or f"gram.{side}.raw" not in calibration.tensors:
        return {}
    before = calibration.gram(side, "all", "raw")
    if "rotation" in tensors:
        T = tensors["rotation"]
        after = spectrum_from_gram(T @ before @ T.mT)
    else:
        after = spectrum_from_gram(before, tensors["kept"])
    result = {}
    for when, values in (("before", spectrum_from_gram(before)), ("after", after)):
        result[f"condition_{when}"] = condition_number(values)
        result[f"effective_rank_{when}"] = effective_rank(values)
    return result
