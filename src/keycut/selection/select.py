"""From a method's function to selections: `select(method, evidence, widths)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from keycut import __version__
from keycut.errors import InputError
from keycut.selection.conditioning import condition_number, effective_rank, spectrum_from_gram
from keycut.selection.evidence import Evidence
from keycut.selection.method import Method
from keycut.selection.methods import method_named
from keycut.selection.selection import Selection


def select(name: str, evidence: Evidence, widths: Sequence[int], **given: Any) -> list[Selection]:
    """One selection for each width, by a method and its options. What the widths share is computed
    once."""
    method = method_named(name)
    options = method.options(given)
    refuse(method, evidence, widths)
    if method.score:
        scores = method.score(evidence, **options)
        found = [{"kept": top(scores, width), "scores": scores} for width in widths]
    elif method.choose:
        found = method.choose(evidence, widths, **options)
    else:
        assert method.rotate
        found = [{"rotation": method.rotate(evidence, width, **options)} for width in widths]
    return [
        Selection(
            {**tensors, **conditioning(evidence, tensors)}, about(method, evidence, width, options)
        )
        for tensors, width in zip(found, widths, strict=True)
    ]


def refuse(method: Method, evidence: Evidence, widths: Sequence[int]) -> None:
    """Everything that can be known to be wrong before the work starts."""
    shape = evidence.checkpoint.shape
    for width in widths:
        if not 1 <= width <= shape.width:
            raise InputError(
                f"a width of {width} for {evidence.checkpoint.folder}: must lie in 1..{shape.width}"
            )
    method.check_target(evidence.target)
    if evidence.calibration is None:
        if "text" in method.needs:
            raise InputError(f"method {method.name} needs a calibration, and none was given")
        return
    if "gradients" in method.needs and "saliency.k" not in evidence.calibration.tensors:
        raise InputError(f"method {method.name} needs gradients, and this calibration has none")
    made_for = evidence.calibration.manifest.get("model_digest")
    if made_for != (found := evidence.checkpoint.digest()):
        raise InputError(
            f"the calibration was made for the model {str(made_for)[:12]}, but "
            f"{evidence.checkpoint.folder} is {found[:12]}: calibrate it again"
        )


def top(scores: Tensor, width: int) -> Tensor:
    """The `width` highest of (..., d_k), ascending by channel; of equals the lower channel."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :width].sort(-1).values


def conditioning(evidence: Evidence, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """How well the keys span before and after, where there is a calibration to tell."""
    if evidence.calibration is None:
        return {}
    before = evidence.calibration.gram("k", "all", "raw")
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


def about(
    method: Method, evidence: Evidence, width: int, options: Mapping[str, Any]
) -> dict[str, object]:
    """Everything that decided the choice."""
    return {
        "keycut": __version__,
        "method": method.name,
        "target": evidence.target,
        "width": width,
        "full_width": evidence.checkpoint.shape.width,
        "model_digest": evidence.checkpoint.digest(),
        **({"seed": evidence.seed} if "seed" in method.needs else {}),
        **options,
        **({"calibration": evidence.calibration.manifest} if evidence.calibration else {}),
    }
