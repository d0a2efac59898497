"""Cross-entropy and divergence from a teacher, straight from hidden states.

The logits of a batch, (tokens, vocabulary), are by far the largest tensors of training, and
distillation needs two sets of them. Here only those of a slice of tokens exist, and their gradient,
known in closed form, is computed together with the loss. flash-linear-attention's fused divergence
knows neither a temperature nor the cross-entropy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS_AT_ONCE = 4096
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
    weight: float,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, ce + weight * kd, and its two terms, which have no gradient of their own: the mean
    cross-entropy over tokens with a target, and the mean over all tokens of
    T^2 KL(teacher || student) with both distributions at temperature T.

    hidden: (batch, length, d), head: (vocabulary, d), likewise the teacher's, whose d may differ;
    targets: (batch, length). T^2 keeps the gradient's size the same at every temperature. Only what
    enters the head gets a gradient: heads are frozen.
    """
    assert not head.requires_grad
    rows = hidden.flatten(0, 1), head, teacher_hidden.flatten(0, 1), teacher_head, targets.flatten()
    losses: Any = _Distillation.apply(*rows, temperature, weight, tokens_at_once)
    return losses[0], losses[1], losses[2]


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, head, teacher_hidden, teacher_head, targets, T, weight, tokens_at_once = given
        known = (targets != IGNORED).sum()
        scales = 1 / known, weight / len(targets)
        ce = kd = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.zeros_like(hidden)
        for start in range(0, len(targets), tokens_at_once):
            rows = slice(start, start + tokens_at_once)
            logits = F.linear(hidden[rows], head)
            teacher_logits = F.linear(teacher_hidden[rows], teacher_head)
            given = (logits, teacher_logits, targets[rows], T, scales)
            more_ce, more_kd, gradient = losses_and_gradient(*given)
            del logits, teacher_logits
            ce, kd = ce + more_ce, kd + more_kd
            of_hidden[rows] = gradient @ head
        ctx.save_for_backward(of_hidden)
        ce, kd = ce / known, kd / len(targets)
        ctx.mark_non_differentiable(ce, kd)
        return ce + weight * kd, ce, kd

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (of_hidden,) = ctx.saved_tensors
        return of_hidden * upstream.to(of_hidden.dtype), *[None] * 7


def losses_and_gradient(
    logits: Tensor, teacher: Tensor, targets: Tensor, T: float, scales: tuple[Tensor, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over tokens of the cross-entropy and of T^2 KL(teacher || student), and the gradient
    by the logits, in their type, of the first sum times one scale plus the second times another.

    All logits: (tokens, vocabulary).
    """
    logs = logits.float().log_softmax(-1)
    log_p, log_q = ((x.float() / T).log_softmax(-1) for x in (logits, teacher))
    ce = F.nll_loss(logs, targets, reduction="sum", ignore_index=IGNORED)
    kd = F.kl_div(log_p, log_q, reduction="sum", log_target=True) * T**2

    of_ce, of_kd = scales
    known = (targets != IGNORED)[:, None]
    gradient = logs.exp_()
    # Not by a mask, for whose size a GPU would have to be waited for.
    gradient.scatter_add_(1, targets.clamp_min(0)[:, None], -known.float())
    gradient *= known * of_ce
    gradient.add_(log_p.exp_() - log_q.exp_(), alpha=T * of_kd)
    return ce, kd, gradient.to(logits.dtype)
