"""PCA: rotate to the principal axes and keep the strongest (proper) or weakest (adversarial).

The paper's negative result. The axes are the eigenvectors of the uncentred second moment
(1/N) sum k k^T of the raw keys over all calibration tokens (target k; kq adds the queries).
"""

from __future__ import annotations

from torch import Tensor
from torch.linalg import eigh

from keycut.selection.evidence import Evidence


def rotation(evidence: Evidence, width: int, *, adversarial: bool) -> Tensor:
    """T: (layers, heads, width, d_k), rows orthonormal, by falling variance."""
    method = "pca_adversarial" if adversarial else "pca_proper"
    moment = evidence.gram(method, "all", "raw") / evidence.calibrated(method).manifest["tokens"]
    vectors = eigh(moment).eigenvectors.flip(-1).mT  # rows, largest variance first
    return vectors[..., -width:, :] if adversarial else vectors[..., :width, :]
