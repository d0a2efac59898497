"""Recovery fine-tuning (RFT): what a model lost with its channels, taught by the unpruned one.

Low-rank adapters on the projections and the causal convolutions learn, norms and biases too if the
configuration says so; everything else is frozen.
The loss is the cross-entropy plus the divergence from the teacher. In the end the adapters are
merged, and what is written is an ordinary model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from reproduction.config.training import Lora, Recovery
from statecut.data.packing import PackedTokens
from statecut.errors import InputError, nearest
from statecut.files import write_json
from statecut.models.architectures import architecture
from statecut.models.architectures.base import Architecture
from statecut.models.checkpoint import Checkpoint, create, load
from statecut.pruning.slicing import Change, Pad, change_channels, cut_back, eps_factor
from statecut.recovery.distillation import distillation_losses, next_tokens
from statecut.recovery.loop import Losses, check_data, explain_out_of_memory, train
from statecut.recovery.output import Output

logger = logging.getLogger(__name__)

TRAINABLE = "trainable.json"  # beside the result: the parameters that learned, name to size

# What pruning leaves alone, beside the options of an architecture: a student that differs from its
# teacher here was never cut from it.
SHARED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_heads",
          "num_v_heads")  # fmt: skip


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

    `padded_to` is a width that the kernels can train, where the student's own is none: it is
    trained with that many key channels, the added ones zero, and cut back. The result has the
    tokenizer of the student and the type that its tensors have on disk; beside it are the loss
    curve and the list of what learned.
    """
    pruned, unpruned = Checkpoint(student), Checkpoint(teacher)
    check_teacher(pruned, unpruned)
    check_data(data, settings, pruned.text_config["vocab_size"])
    output.check()
    device = torch.device(device)
    run = output.checkpoints_of(
        "recovery",
        data,
        student=pruned.digest(),
        teacher=unpruned.digest(),
        settings=settings.defining(),
        padded_to=padded_to,
        device=device.type,
    )
    model = load(student, dtype=torch.float32)
    _, some_tensor = next(pruned.tensors())
    width = pruned.shape.width
    if padded_to is not None:
        model = resize_model(model, Pad(padded_to))
        scale_eps(model, eps_factor(pruned.shape, replace(pruned.shape, width=padded_to)))
    adapted = with_adapters(
        model, settings.lora, settings.seed, norms_and_biases=settings.norms_and_biases
    ).to(device)
    teacher_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher_model = load(teacher, dtype=teacher_dtype, device=device).requires_grad_(False)

    def loss(ids: Tensor) -> Losses:
        return recovery_loss(adapted, teacher_model, ids, settings)

    with run as checkpoints:
        trainable = checkpoints.folder / TRAINABLE
        write_json(trainable, trainable_parameters(adapted))
        with explain_out_of_memory("recovery", more_parts(settings)):
            train(
                adapted, loss, data, settings, checkpoints, work="recovery", saving=output.saving,
                accumulate=settings.parts,
            )  # fmt: skip
        merged = adapted.merge_and_unload().cpu()
        if padded_to is not None:
            merged = resize_model(merged, cut_back(pruned.shape, width))
        with_tokenizer = replace(output, tokenizer=student)
        with_tokenizer.write(merged.to(some_tensor.dtype), checkpoints, files=[trainable])


def check_teacher(student: Checkpoint, teacher: Checkpoint) -> None:
    """An error unless the student can have been cut from the teacher, and is written whole."""
    student.check_text_only()
    for key in (*SHARED, *student.architecture.options):
        ours, theirs = student.text_config.get(key), teacher.text_config.get(key)
        if ours != theirs:
            raise InputError(
                f"{student.folder} has {key} {ours}, its teacher {teacher.folder} has {theirs}: "
                "a model is recovered with the one that it was pruned from"
            )
    if not (student.shape == teacher.shape or student.shape.narrower_than(teacher.shape)):
        ours, theirs = ((s.width, s.value_width) for s in (student.shape, teacher.shape))
        raise InputError(
            f"{student.folder} has keys and values of widths {ours[0]} and {ours[1]}, its teacher "
            f"{teacher.folder} of {theirs[0]} and {theirs[1]}: pruning makes none wider"
        )


def more_parts(settings: Recovery) -> str:
    """What to change where a step does not fit into a GPU."""
    batch, parts = settings.batch, settings.parts
    if parts == batch:
        return f"`recovery.parts` is {parts}, one sequence each: use a GPU with more memory"
    more = next(n for n in range(parts + 1, batch + 1) if batch % n == 0)
    return (
        f"`recovery.parts` is {parts}: try {more}, which needs less memory and gives the same but "
        "for rounding; the run goes on from its last checkpoint, and what is finished stays"
    )


def with_adapters(model: Any, lora: Lora, seed: int, *, norms_and_biases: bool = False) -> Any:
    """The model with its adapters in place; they, the convolutions and, if so asked, norms and
    biases require gradients."""
    kind = architecture(model.config.to_dict())
    modules = lora.modules or kind.projections
    check_adapter_modules(model, modules)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type] # divided by r, so any number will do
            lora_dropout=0.0,
            target_modules=list(modules),
        ),
    )
    # Drawn again by a generator of their own: the library draws and discards numbers for B too,
    # so a padded model would start from other adapters than the narrow one.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(parameter.data, a=math.sqrt(5), generator=generator)
        if is_convolution(name, kind) or (norms_and_biases and is_norm_or_bias(name)):
            parameter.requires_grad_(True)
    return adapted


def is_convolution(name: str, kind: Architecture) -> bool:
    return any(f".{convolution}." in name for convolution in kind.convolutions)


def is_norm_or_bias(name: str) -> bool:
    """Of a norm, or a bias of anything: `attn_norm.weight`, `o_norm.weight`, `dt_bias`."""
    *_, module, parameter = name.split(".")
    return module.endswith("norm") or parameter.endswith("bias")


def trainable_parameters(adapted: Any) -> dict[str, int]:
    """The size of each parameter that learns, by name; a summary is logged."""
    kind = architecture(adapted.get_base_model().config.to_dict())
    everything = list(adapted.named_parameters())
    sizes = {name: p.numel() for name, p in everything if p.requires_grad}
    adapters = sum(n for name, n in sizes.items() if ".lora_" in name)
    filters = sum(n for name, n in sizes.items() if is_convolution(name, kind))
    learning, total = sum(sizes.values()), sum(p.numel() for _, p in everything)
    others = learning - adapters - filters
    logger.info(
        f"recovery: {learning:,} of {total:,} parameters learn: {adapters:,} in adapters, "
        f"{filters:,} in convolutions" + (f", {others:,} in norms and biases" if others else "")
    )
    return sizes


def check_adapter_modules(model: nn.Module, modules: Iterable[str]) -> None:
    """An error if an adapter is asked for where the model has no projection."""
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for module in modules:
        if module not in names:
            raise InputError(
                f"no projection of the model is called {module!r}{nearest(module, names)}"
            )


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


def resize_model(model: Any, change: Change) -> Any:
    """The model in memory with its key channels changed, in float32."""
    config = model.config.to_dict()
    kind = architecture(config)
    tensors = change_channels(model.state_dict().items(), kind, kind.shape(config), change)
    other = create(kind.resized(config, change.width), seed=0)
    other.load_state_dict(tensors)
    return other


def scale_eps(model: Any, factor: float) -> None:
    """Multiply the eps of every output norm, in memory alone: the config keeps what it says."""
    config = model.config.to_dict()
    kind = architecture(config)
    norm, _, eps = kind.norm_eps.rpartition(".")
    for layer in kind.shape(config).layers:
        module = model.get_submodule(kind.mixer.format(layer=layer) + norm)
        setattr(module, eps, getattr(module, eps) * factor)
