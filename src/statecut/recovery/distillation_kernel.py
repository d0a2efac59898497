"""`losses_and_gradient` of distillation.py as one kernel: both sets of logits are read twice and
the gradient is written once, in the place of the student's, where PyTorch passes over them some
twenty times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def _losses(  # type: ignore[no-untyped-def]
    logits, teacher, targets, ce, kd, of_ce, of_kd, temperature, vocabulary, BLOCK: tl.constexpr
):
    """One token."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    teacher += row * vocabulary
    target = tl.load(targets + row)
    known = target >= 0
    at_target = tl.load(logits + target, mask=known, other=0.0).to(tl.float32)

    # The logarithms of the sums of exp(z), exp(z / T) and exp(t / T), as blocks come by.
    high = -float("inf")
    teacher_high = -float("inf")
    plain = 0.0
    warm = 0.0
    taught = 0.0
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < vocabulary
        z = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(teacher + place, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(z, 0))
        teacher_higher = tl.maximum(teacher_high, tl.max(t, 0))
        plain = plain * tl.exp(high - higher) + tl.sum(tl.exp(z - higher), 0)
        warm *= tl.exp((high - higher) / temperature)
        warm += tl.sum(tl.exp((z - higher) / temperature), 0)
        taught *= tl.exp((teacher_high - teacher_higher) / temperature)
        taught += tl.sum(tl.exp((t - teacher_higher) / temperature), 0)
        high, teacher_high = higher, teacher_higher
    plain = tl.log(plain) + high
    warm = tl.log(warm) + high / temperature
    taught = tl.log(taught) + teacher_high / temperature

    by_ce = tl.where(known, tl.load(of_ce), 0.0)
    divergence = 0.0
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < vocabulary
        z = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(teacher + place, mask=inside, other=0.0).to(tl.float32)
        log_q = t / temperature - taught
        log_p = z / temperature - warm
        q = tl.exp(log_q)
        divergence += tl.sum(tl.where(inside, q * (log_q - log_p), 0.0), 0)
        gradient = by_ce * (tl.exp(z - plain) - tl.where(place == target, 1.0, 0.0))
        gradient += of_kd * temperature * (tl.exp(log_p) - q)
        tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(ce + row, tl.where(known, plain - at_target, 0.0))
    tl.store(kd + row, divergence * temperature * temperature)


def losses_and_gradient(
    logits: Tensor, teacher: Tensor, targets: Tensor, T: float, scales: tuple[Tensor, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient takes the place of the logits."""
    tokens, vocabulary = logits.shape
    ce, kd = torch.empty(2, tokens, device=logits.device)
    given = (logits, teacher, targets, ce, kd, *scales, T, vocabulary)
    _losses[(tokens,)](*given, BLOCK=BLOCK, num_warps=WARPS)
    return ce.sum(), kd.sum(), logits
