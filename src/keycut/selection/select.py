"""From a method's function to selections: `select(method, model, widths)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from keycut import __version__
from keycut.calibration import Calibration
from keycut.errors import InputError
from keycut.selection.conditioning import condition_number, effective_rank, spectrum_from_gram
from keycut.selection.method import Method, Target
from keycut.selection.methods import method_named
from keycut.selection.selection import Selection
from keycut.selection.statistics import ModelStatistics


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
    check_inputs(method, model, widths)
    if method.score:
        scores = method.score(model, target, **options)
        results = [{"kept": top(scores, width), "scores": scores} for width in widths]
    elif method.choose:
        results = method.choose(model, target, widths, **options)
    else:
        assert method.rotate
        results = [{"rotation": method.rotate(model, target, w, **options)} for w in widths]
    checkpoint, calibration = model.checkpoint, model.calibration
    about = {
        "keycut": __version__,
        "method": method.name,
        "target": target,
        "full_width": checkpoint.shape.width,
        "model_digest": checkpoint.digest(),
        **options,
        **({"calibration": calibration.manifest} if calibration else {}),
    }
    return [
        Selection(tensors | conditioning(calibration, tensors), {**about, "width": width})
        for tensors, width in zip(results, widths, strict=True)
    ]


def check_inputs(method: Method, model: ModelStatistics, widths: Sequence[int]) -> None:
    """Everything that can be known to be wrong before the work starts."""
    full = model.checkpoint.shape.width
    for width in widths:
        if not 1 <= width <= full:
            raise InputError(
                f"a width of {width} for {model.checkpoint.folder}: must lie in 1..{full}"
            )
    if model.calibration is None:
        if "text" in method.needs:
            raise InputError(f"method {method.name} needs a calibration, and none was given")
        return
    if "gradients" in method.needs and "saliency.k" not in model.calibration.tensors:
        raise InputError(f"method {method.name} needs gradients, and this calibration has none")
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


def conditioning(calibration: Calibration | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """How well the keys span before and after, where there is a calibration to tell."""
    if calibration is None:
        return {}
    before = calibration.gram("k", "all", "raw")
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
