"""Fisher: s_j = sum over tokens t of (q_tj dL/dq_tj)^2 + (k_tj dL/dk_tj)^2, q and k as the delta
rule receives them: the squared effect on the loss of losing the channel, token by token. Of values,
x as it enters the output projection: sum over t of (x_tj dL/dx_tj)^2."""

from __future__ import annotations

from statecut.pruning.method import Method, ModelStatistics, Target, Tensor


def score(model: ModelStatistics, target: Target) -> Tensor:
    return model.sum_over(target, model.fisher)


METHODS = (
    Method("fisher", label="Fisher", colour="#6f63d6", dash=(5, 1, 1, 1),
           about="Keeps the largest squared effect on the loss, token by token.",
           needs=("text", "gradients"), values=True, score=score),
)  # fmt: skip
