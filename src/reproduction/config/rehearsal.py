"""A rehearsal of a run: its own rules, models, shapes and tables, with hardly any work in them.

What can fail because of a shape, memory, a kernel, the disk, the queue or the environment fails
here first. The numbers mean nothing, and go to a folder of their own.
"""

from __future__ import annotations

import re
from typing import Any

from reproduction.config.evaluation import TASKS
from reproduction.config.needs import needs
from reproduction.config.run import Config
from statecut.errors import InputError
from statecut.hub import HubItem, resolve

RUN = "rehearsal"
TRAINING = {"steps": 20, "warmup": 2, "epochs": 1_000_000}  # as often as the steps take
SEQUENCES = 64  # of a slice, or those of one step where more are trained on at once
CALIBRATION, DOCUMENTS = 8, 8
STAND_IN = {  # for tasks that report these: one of the demo's
    TASKS[name]: name for name in ("demo_prose", "demo_last_word", "demo_choice", "demo_recall")
} | {("acc",): "demo_choice"}


def rehearsed(config: Config) -> dict[str, Any]:
    """What a configuration becomes. What it takes from the hub and is not here is made up: text of
    the installed packages, tasks from it, a tokenizer of it, models with random weights."""
    data = config.model_dump(mode="json", exclude_unset=True)
    data |= {
        "run": RUN,
        "about": f"A rehearsal of {config.run}: it shows that all of it runs, and no number of it "
        "means anything.",
        "seeds": data["seeds"][:1],
    }
    steps: dict[str, int] = {}  # sequences of one step, by slice
    for name, recipe in config.recipes.items():
        data["recipes"][name] |= TRAINING
        steps[recipe.data] = max(recipe.batch * recipe.world_size, steps.get(recipe.data, 0))
    for name, corpus in data["corpora"].items():
        for part, size in corpus["slices"].items():
            corpus["slices"][part] = min(size, max(SEQUENCES, steps.get(f"{name}/{part}", 0)))
    if text := config.calibration:
        tokens = CALIBRATION * config.corpora[text.data.split("/")[0]].length
        data["calibration"] |= {"sequences": CALIBRATION, "rows": min(text.rows, tokens)}
    if config.recovery:
        data["recovery"] |= {**TRAINING, "seeds": None}
    data["models"] = {n: data["models"][n] for n, m in config.models.items() if not m.training}
    for model in data["models"].values():
        model["source"].pop("trainings", None)
    for benchmark in data.get("benchmarks", {}).values():
        benchmark |= {"warmup": 1, "repeats": 1}
    for table in data.get("tables", {}).values():
        for several in ("recovery_seeds", "trainings"):
            table.pop(several, None)
    data["evaluation"]["protocol"] = RUN
    for suite in data["evaluation"]["suites"].values():
        suite |= {"seeds": None, "documents": DOCUMENTS}
        for task in suite["tasks"].values():
            if file := task.get("file"):  # that the run may make itself
                task["file"] = re.sub(f"^results/{re.escape(config.run)}/", f"results/{RUN}/", file)
    for need in needs(config):
        if need.hub and not _is_here(need.hub):
            _make_up(data, need.kind, need.name)
    return data


def _is_here(item: HubItem) -> bool:
    try:
        resolve(*item.key, revision=item.revision, patterns=item.patterns)
    except InputError:
        return False
    return True


def _make_up(data: dict[str, Any], kind: str, name: str) -> None:
    corpora, evaluation = data["corpora"], data["evaluation"]
    text = next(iter(corpora))
    if kind == "corpus":
        kept = {key: corpora[name][key] for key in ("length", "seed", "slices")}
        corpora[name] = {"kind": "documentation", "part": "training", **kept}
    elif kind == "tokenizer":
        data["tokenizers"][name] = {"kind": "train", "corpus": text, "vocab_size": 1024}
    elif kind == "model":
        data["models"][name]["source"] = {"kind": "random"}
    else:
        evaluation["made_from"] = f"{text}/{next(iter(corpora[text]['slices']))}"
        made = STAND_IN[TASKS[name]]
        for suite in evaluation["suites"].values():
            for task in suite["tasks"].values():
                if task["task"] == name and "file" not in task:
                    task |= {"task": made, "version": 1, "revision": "main"}
                    task["file"] = f"results/{RUN}/tasks/{made}.jsonl"
