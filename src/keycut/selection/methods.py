"""All methods behind one door: `select(method, evidence, widths)`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from keycut import __version__
from keycut.errors import InputError, nearest
from keycut.selection import FILES, module
from keycut.selection.conditioning import condition_number, effective_rank, spectrum_from_gram
from keycut.selection.evidence import Evidence
from keycut.selection.selection import Selection

METHODS = tuple(FILES)
SCORED = ("l1", "rand", "s_wanda", "grad")
WITHOUT_CALIBRATION = ("l1", "rand")


def select(method: str, evidence: Evidence, widths: Sequence[int]) -> list[Selection]:
    """One selection for each width. What the widths share is computed once."""
    refuse(method, evidence, widths)
    file: Any = import_module(module(method))
    if method in SCORED:
        scores = file.scores(evidence)
        found = [{"kept": top(scores, width), "scores": scores} for width in widths]
    elif method in ("drrqr", "qrcp"):
        found = [
            {
                "kept": chosen.kept,
                "swaps": chosen.swaps,
                "largest_gain": chosen.largest_gain,
                "log_volume": chosen.log_volume,
            }
            for chosen in file.choose(evidence, widths, swap=method == "drrqr")
        ]
    else:
        adversarial = method == "pca_adversarial"
        found = [
            {"rotation": file.rotation(evidence, width, adversarial=adversarial)}
            for width in widths
        ]
    return [
        Selection({**tensors, **conditioning(evidence, tensors)}, about(method, evidence, width))
        for tensors, width in zip(found, widths, strict=True)
    ]


def refuse_method(method: str) -> None:
    if method not in METHODS:
        raise InputError(f"method {method!r} does not exist{nearest(method, METHODS)}")


def refuse(method: str, evidence: Evidence, widths: Sequence[int]) -> None:
    """Everything that can be known to be wrong before the work starts."""
    refuse_method(method)
    shape = evidence.checkpoint.shape
    for width in widths:
        if not 1 <= width <= shape.width:
            raise InputError(
                f"a width of {width} for {evidence.checkpoint.folder}: must lie in 1..{shape.width}"
            )
    if evidence.calibration is None and method in WITHOUT_CALIBRATION:
        return
    made_for = evidence.calibrated(method).manifest.get("model_digest")
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


def about(method: str, evidence: Evidence, width: int) -> dict[str, object]:
    """Everything that decided the choice."""
    said: dict[str, object] = {
        "keycut": __version__,
        "method": method,
        "target": evidence.target,
        "width": width,
        "full_width": evidence.checkpoint.shape.width,
        "model_digest": evidence.checkpoint.digest(),
    }
    if method == "rand":
        said["seed"] = evidence.seed
    if method in ("drrqr", "qrcp"):
        said |= {"rows": evidence.rows, "activations": evidence.activations}
    if method == "drrqr":
        said["f"] = evidence.f
    if evidence.calibration is not None:
        said["calibration"] = evidence.calibration.manifest
    return said
