"""Recovery fine-tuning (RFT): the unpruned model teaches a pruned one what it lost.

Low-rank adapters on the projections and the causal convolutions learn, norms and biases too if the
settings say so; everything else is frozen. The loss is the cross-entropy plus the divergence from
the teacher. In the end the adapters are merged, and what is written is an ordinary model.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from statecut.data.packing import PackedTokens
from statecut.errors import InputError, nearest
from statecut.models.architectures import architecture
from statecut.models.checkpoint import Checkpoint, clean_name, load, rewrite, trained
from statecut.pruning.slicing import Pad, cut_back, slice_in_memory
from statecut.recovery.checkpoints import Output
from statecut.recovery.distillation import distillation_losses, next_tokens
from statecut.recovery.loop import Losses, check_data, explain_out_of_memory, train
from statecut.recovery.settings import Recovery

logger = logging.getLogger(__name__)


def recover(
    student: Path | str,
    teacher: Path | str,
    data: PackedTokens,
    settings: Recovery,
    output: Output,
    *,
    device: torch.device | str = "cpu",
    padded_to: int | None = None,
) -> None:
    """Recover the model in one folder with the help of another, and write it to a third.

    `padded_to` is a width that the kernels can train, where they cannot train the student's own: it
    is trained with that many key channels, the added ones zero, and cut back. The result is the
    student's files with what was trained in its place, in the types that tensors have there, and
    the loss curve beside them.
    """
    pruned = Checkpoint(student)
    check_data(data, settings, pruned.text_config["vocab_size"])
    output.check()
    device = torch.device(device)
    run = output.checkpoints_of(
        "recovery",
        data,
        student=pruned.digest(),
        teacher=Checkpoint(teacher).digest(),
        settings=settings.defining(),
        padded_to=padded_to,
        device=device.type,
    )
    model = load(student, dtype=torch.float32)
    if padded_to is not None:
        model = slice_in_memory(model, Pad(padded_to), eps="kept")
        padded = replace(pruned.shape, width=padded_to)
        scale_eps(model, pruned.architecture.eps_factor(pruned.shape, padded))
    adapted = with_adapters(model, settings).to(device)
    teacher_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher_model = load(teacher, dtype=teacher_dtype, device=device).requires_grad_(False)

    def loss(ids: Tensor) -> Losses:
        return recovery_loss(adapted, teacher_model, ids, settings)

    with run as checkpoints:
        with explain_out_of_memory("recovery", less_memory(settings)):
            train(
                adapted, loss, data, settings, checkpoints,
                work="recovery", save_seconds=output.save_seconds,
            )  # fmt: skip
        learned = {
            re.sub(r"\.lora_[AB]\.default", "", clean_name(name))
            for name, parameter in adapted.named_parameters()
            if parameter.requires_grad
        }
        merged = adapted.merge_and_unload().cpu()
        if padded_to is not None:
            back = cut_back(pruned.shape, pruned.shape.width)
            merged = slice_in_memory(merged, back, eps="kept")
        with output.written(checkpoints) as aside:
            new_tensor = trained(merged, learned, pruned.shape)
            rewrite(pruned, aside, new_tensor, links=output.links)


def recovered_facts(
    settings: Recovery, length: int, student: Checkpoint, teacher: Checkpoint
) -> dict[str, object]:
    """What the record of a recovered model says."""
    lora, distillation = settings.lora, settings.distillation
    modules = ", ".join(lora.modules or student.architecture.projections)
    tokens = f"{settings.batch} x {length} tokens of {settings.data}"
    return {
        "recovery": f"{settings.steps} steps of {tokens}",
        "adapters, merged": f"rank {lora.rank}, alpha {lora.alpha:g} on {modules}",
        **({"also trained": "norms and biases"} if settings.norms_and_biases else {}),
        "distillation": f"temperature {distillation.temperature:g}, weight {distillation.weight:g}",
        "teacher digest": teacher.digest(),
    }


def less_memory(settings: Recovery) -> str:
    """What to change where a step does not fit into a GPU."""
    batch, steps = settings.batch, settings.gradient_accumulation_steps
    now = f"`gradient_accumulation_steps` is {steps}"
    if steps == batch:
        return f"{now}, one sequence each: use a GPU with more memory"
    more = next(n for n in range(steps + 1, batch + 1) if batch % n == 0)
    return (
        f"{now}: try {more}, which needs less memory and gives the same but for rounding; the run "
        "goes on from its last checkpoint, and what is finished stays"
    )


def with_adapters(model: Any, settings: Recovery) -> Any:
    """The model with its adapters in place. Gradients are required by them, the convolutions and,
    if the settings say so, norms (`o_norm.weight`) and biases (`dt_bias`)."""
    config, lora = model.config.to_dict(), settings.lora
    kind = architecture(config)
    known = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for module in lora.modules or ():
        if module not in known:
            raise InputError(
                f"no projection of the model is called {module!r}{nearest(module, known)}"
            )
    # Layers with softmax attention may have projections of the same names.
    layers = kind.shape(config).layers
    own = [kind.name(layer, part) for layer in layers for part in kind.projections]
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type] # divided by r, so any number will do
            lora_dropout=0.0,
            target_modules=list(lora.modules or own),
        ),
    )
    # Sampled again by a generator of their own: the library samples and discards numbers for B too,
    # so a padded model would start from other adapters than the narrow one.
    generator = torch.Generator().manual_seed(settings.seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(parameter.data, a=math.sqrt(5), generator=generator)
        *_, module, last = name.split(".")
        if any(f".{convolution}." in name for convolution in kind.convolutions) or (
            settings.norms_and_biases and (module.endswith("norm") or last.endswith("bias"))
        ):
            parameter.requires_grad_(True)
    learning, total = adapted.get_nb_trainable_parameters()
    logger.info(f"recovery: {learning:,} of {total:,} parameters learn")
    return adapted


def recovery_loss(adapted: Any, teacher: Any, ids: Tensor, settings: Recovery) -> Losses:
    """Cross-entropy plus weighted divergence of (batch, length) tokens."""
    student = adapted.get_base_model()
    with torch.no_grad():
        taught = teacher.model(ids, use_cache=False).last_hidden_state
    losses = distillation_losses(
        student.model(ids, use_cache=False).last_hidden_state,
        student.lm_head.weight,
        taught,
        teacher.lm_head.weight,
        next_tokens(ids),
        settings.distillation.temperature,
        settings.distillation.weight,
    )
    return Losses(*losses)


def scale_eps(model: Any, factor: float) -> None:
    """Multiply the eps of every output norm, only in memory: the config keeps what it says."""
    config = model.config.to_dict()
    kind = architecture(config)
    norm, _, eps = kind.norm_eps.rpartition(".")
    for layer in kind.shape(config).layers:
        module = model.get_submodule(kind.mixer.format(layer=layer) + norm)
        setattr(module, eps, getattr(module, eps) * factor)
