"""Cross-entropy and divergence from a teacher, straight from hidden states.

The logits of a whole batch, (tokens, vocabulary), are by far the largest tensors of training, and
distillation needs two sets of them. Here only those of a slice of tokens exist, and are computed
again for the gradient. flash-linear-attention has a fused divergence for GPUs; it knows neither
a temperature nor the cross-entropy, which here comes of the same logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TOKENS_AT_ONCE = 1024
IGNORED = -100  # the target of a token that nothing follows


def next_tokens(ids: Tensor) -> Tensor:
    """The target of each token of (batch, length): the one after it."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORED)


def distillation_losses(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    targets: Tensor,
    temperature: float,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy over tokens with a target, and the mean over all tokens of
    T^2 KL(teacher || student) with both distributions at temperature T.

    hidden: (batch, length, d), head: (vocabulary, d), likewise the teacher's, whose d may differ;
    targets: (batch, length). T^2 keeps the gradient's size the same at every temperature.
    """
    targets = targets.flatten()
    slices = zip(
        hidden.flatten(0, 1).split(tokens_at_once),
        teacher_hidden.flatten(0, 1).split(tokens_at_once),
        targets.split(tokens_at_once),
        strict=True,
    )
    ce = kd = hidden.new_zeros((), dtype=torch.float32)
    for student, teacher, slice_targets in slices:
        more_ce, more_kd = checkpoint(
            _sums, student, head, teacher, teacher_head, slice_targets, temperature,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        ce, kd = ce + more_ce, kd + more_kd
    return ce / (targets != IGNORED).sum(), kd / len(targets)


def _sums(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    targets: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, head).float()
    with torch.no_grad():
        teacher = (F.linear(teacher_hidden, teacher_head).float() / temperature).log_softmax(-1)
    ce = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    student = (logits / temperature).log_softmax(-1)
    kd = F.kl_div(student, teacher, reduction="sum", log_target=True)
    return ce, kd * temperature**2
