"""PCA: rotate to the principal axes and keep the strongest (proper) or weakest (adversarial).

The paper's negative result. The axes are the eigenvectors of the uncentred second moment
(1/N) sum k k^T of the raw keys over all calibration tokens (target k; kq adds the queries).
"""

from __future__ import annotations

from statecut.pruning.method import Method, ModelStatistics, Target, Tensor


def proper(model: ModelStatistics, target: Target) -> Tensor:
    """Orthonormal rows by falling variance."""
    return adversarial(model, target).flip(-2)


def adversarial(model: ModelStatistics, target: Target) -> Tensor:
    """Orthonormal rows by rising variance."""
    from torch.linalg import eigh

    moment = model.sum_over(target, model.gram) / model.tokens
    return eigh(moment).eigenvectors.mT


METHODS = (
    Method("pca_proper", label="PCA (prop.)", about="Rotates to the strongest directions.",
           colour="#c2455a", needs=("text",), targets=("k", "kq", "q"), rotate=proper),
    Method("pca_adversarial", label="PCA (adv.)", about="Rotates to the weakest directions.",
           colour="#8a6a3c", dash=(4, 1.5), needs=("text",), targets=("k", "kq", "q"),
           rotate=adversarial),
)  # fmt: skip
