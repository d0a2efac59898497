"""Kimi K3, as its published files have it: Kimi Delta Attention with a gate of full rank, and MLA
between them, in a multimodal model whose experts are quantised. Its classes are remote code, which
Statecut does not run: it is cut by its weights alone (`l1`, `rand`)."""

from __future__ import annotations

from dataclasses import replace

from statecut.models.architectures import bailing_hybrid, kimi_linear

# A_log has a number for each head, and zeros behind them up to a length of its own: it stays.
ARCHITECTURE = replace(
    kimi_linear.ARCHITECTURE,
    model_type="kimi_k3",
    rule=None,
    since=None,
    text_model="language_model.model.",
    passthrough=("vision_tower.", "mm_projector."),
    value_tensors=bailing_hybrid.ARCHITECTURE.value_tensors,
    bottlenecks=kimi_linear.ARCHITECTURE.bottlenecks[:1],
)
