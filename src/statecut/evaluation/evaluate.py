"""`statecut evaluate`: the perplexity of a text by the library alone, tasks by lm-eval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity, read_tokens
from statecut.evaluation.request import EvaluationRequest
from statecut.hub import model_folder
from statecut.models.checkpoint import Checkpoint, load
from statecut.models.kernels import checked_device


@dataclass(frozen=True)
class Evaluation:
    perplexity: float | None = None  # of a text,
    tokens: int = 0  # of which so many
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # numbers by name

    def __str__(self) -> str:
        lines = []
        if self.perplexity is not None:
            lines.append(f"perplexity  {self.perplexity:.3f}  ({self.tokens:,} tokens)")
        for task, numbers in self.tasks.items():
            lines += [f"{task}  {name}  {value:.4f}" for name, value in numbers.items()]
        return "\n".join(lines)


def run(request: EvaluationRequest) -> Evaluation:
    model, device = Checkpoint(model_folder(request.model)), checked_device(request.device)
    result: dict[str, Any] = {}
    if request.text is not None:
        sizes = {"length": request.length, "seed": request.seed}
        ids = read_tokens(request.text, model, sequences=request.sequences, **sizes)
        result["perplexity"] = perplexity(model, ids, device=device, batch=request.batch)
        result["tokens"] = ids.numel()
    if request.tasks is not None:
        result["tasks"] = _tasks(request, model, device)
    return Evaluation(**result)


def _tasks(request: EvaluationRequest, model: Checkpoint, device: str) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    manager = TaskManager(include_path=str(request.include_path) if request.include_path else None)
    names = str(request.tasks).split(",")
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise InputError(f"--tasks: lm-eval has no {', '.join(unknown)}: see `lm-eval ls tasks`")
    loaded = load(model.folder, dtype=model.compute_dtype(device), device=device)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    sizes = {"batch_size": request.batch, "max_length": request.length}
    found = simple_evaluate(
        HFLM(pretrained=loaded, tokenizer=tokenizer, **sizes),
        tasks=names,
        task_manager=manager,
        limit=request.limit,
        bootstrap_iters=0,
    )
    results = {
        task: {name.removesuffix(",none"): n for name, n in numbers.items() if _is_number(n)}
        for task, numbers in found["results"].items()
    }
    if not all(math.isfinite(n) for numbers in results.values() for n in numbers.values()):
        raise InputError(f"{model.folder}: some results are not finite: {results}")
    return results


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
