"""Strong RRQR in obvious lines, which the fast one is compared with."""

import numpy as np
import scipy.linalg
import torch

from statecut.pruning.rrqr import ROUNDING, StrongRRQR


def strong_rrqr_slow(matrix, keep, f=1.5):
    """The same for one matrix of full rank, refactored at every swap: slow and obvious."""
    M, k = np.asarray(matrix, dtype=np.float64), keep
    _, R, order = scipy.linalg.qr(M, mode="economic", pivoting=True)
    swaps = 0
    while True:
        A, B, C = R[:k, :k], R[:k, k:], R[k:, k:]
        omega = 1 / np.linalg.norm(np.linalg.inv(A), axis=1)
        gamma = np.linalg.norm(C, axis=0)
        rho = np.hypot(np.linalg.solve(A, B), gamma / omega[:, None])
        largest = rho.max(initial=0.0)
        if largest <= f * (1 + ROUNDING):
            break
        i, j = np.argwhere(rho == largest)[0]
        order[[i, k + j]] = order[[k + j, i]]
        R = np.linalg.qr(M[:, order], mode="r")
        swaps += 1
    log_volume = np.log(np.abs(np.diag(A))).sum()
    kept = np.sort(order[:k]).astype(np.int64)
    parts = (kept, order.astype(np.int64), swaps, largest, log_volume)
    return StrongRRQR(*map(torch.as_tensor, parts))
