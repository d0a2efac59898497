"""Evaluations side by side, as a run of many small models has them: where do their seconds go?

    python benchmarks/evaluation_jobs.py --work FOLDER [--jobs 2]           on a CPU
    python benchmarks/evaluation_jobs.py --work FOLDER --gpu --jobs 16      on a GPU
    PYTHONPATH=OTHER_CHECKOUT/src python benchmarks/evaluation_jobs.py ...  the same of other code

A job is the lab's suite `ppl`, WikiText and LAMBADA, on a model of its own. It runs in a fork of a
process that has the libraries loaded, as `reproduction.running.forkserver` has: first one alone,
which compiles kernels and keeps what others can use, then --jobs at once. CPU seconds go to the
innermost of the stages that is at work.

--work keeps models and texts for the next call, but nothing that evaluations keep. The model is a
random one of the lab's size, or --model. On a CPU it is loaded, but what it would answer in minutes
is made up from the tokens. The texts are --data, a folder with wikitext2_test.raw and
lambada_openai_test.jsonl, or as many words of documentation. Triton's tuning is cut short (two
configurations of each kernel) without --tuned.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import existing

from reproduction.running.code import SOURCE
from reproduction.running.forkserver import GPU, before_the_fork, fork
from statecut import logs
from statecut.files import read_json, write_json

LAB = {"model_type": "delta_net", "hidden_size": 512, "num_hidden_layers": 7, "num_heads": 4,
       "vocab_size": 32000, "tie_word_embeddings": True}  # fmt: skip
WINDOW = 2048
COLUMNS = {
    "wikitext_word_ppl": ("wikitext", "word_perplexity", 2),
    "lambada_ppl": ("lambada_openai", "perplexity", 1),
}
# Documents of each task and words of each document: those of the real test sets.
WORDS = {"wikitext": ("page", 62, 3900), "lambada_openai": ("text", 5153, 75)}
# What is timed, of this checkout or another one, which may lack some.
STAGES = {
    "start": ["statecut.models.checkpoint:_auto_classes"],
    "read": ["reproduction.suites.data:documents", "reproduction.suites.suite:_requests"],
    "tokenise": ["statecut.data.tokenizer:Tokenizer.encode",
                 "reproduction.suites.suite:load_tokenizer",
                 "reproduction.suites.language_model:load_tokenizer"],
    "digests": ["reproduction.suites.suite:_conditions"],
    "load": ["reproduction.suites.language_model:load"],
    "model": ["reproduction.suites.language_model:LanguageModel._scores"],
    "lm-eval": ["reproduction.suites.suite:measure", "reproduction.suites.suite:make_requests"],
    "statistics": ["reproduction.suites.harness:standard_error",
                   "reproduction.suites.harness:kept_resamples"],
}  # fmt: skip


class Clock:
    """CPU seconds of this process by stage: of those that are at work, the innermost."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys([*STAGES, "other"], 0.0)
        self.working = ["other"]
        self.last = time.process_time()

    def turn(self) -> None:
        now = time.process_time()
        self.seconds[self.working[-1]] += now - self.last
        self.last = now

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self.working.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.working.pop()

        return run

    def watch(self, stage: str, place: str) -> None:
        module, _, path = place.partition(":")
        *outer, name = path.split(".")
        owner = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        if hasattr(owner, name):
            setattr(owner, name, self.timed(stage, getattr(owner, name)))


def made_up(_: Any, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    return [(-4.0 * n - sum(ids) % 97 / 97, sum(ids) % 3 == 0) for ids, n in rows]


def job(model: Path, folder: Path, options: argparse.Namespace, started: float) -> None:
    """One evaluation: the child's part."""
    clock = Clock()
    clock.timed("start", importlib.import_module)("reproduction.suites.suite")
    from perplexity import one_suite

    from reproduction.suites import suite

    if not options.gpu:
        suite.LanguageModel._scores = made_up
    for stage, places in STAGES.items():
        for place in places:
            clock.watch(stage, place)
    if options.gpu and not options.tuned:
        from evaluation import quickly_tuned

        quickly_tuned()
    if options.gpu:
        from reproduction.running.gpus import limit_memory

        limit_memory(1 / options.jobs)
    suite.evaluate(
        model, "suite", one_suite(COLUMNS, test_sets(options), WINDOW, None),
        folder / f"{model.name}.json", cache=folder / "cache",
        device="cuda" if options.gpu else "cpu",
    )  # fmt: skip
    clock.turn()
    took = {"wall": time.monotonic() - started, "cpu": time.process_time()}
    write_json(folder / f"{model.name}.seconds", {**took, **clock.seconds})


def together(models: list[Path], folder: Path, options: argparse.Namespace) -> list[dict]:
    """A job for each model, all at once."""
    started = time.monotonic()
    children = [fork(job, model, folder, options, started) for model in models]
    ended = [os.waitpid(child, 0)[1] for child in children]
    if any(ended):
        sys.exit("a job failed: see above")
    return [read_json(folder / f"{model.name}.seconds") for model in models]


def test_sets(options: argparse.Namespace) -> dict[str, Path]:
    if options.data:
        return {"wikitext": options.data / "wikitext2_test.raw",
                "lambada_openai": options.data / "lambada_openai_test.jsonl"}  # fmt: skip
    return {task: options.work / f"{task}.jsonl" for task in WORDS}


def make(options: argparse.Namespace) -> None:
    """The texts, and a model to make copies of. In a process of its own: nothing that computes
    may come before a fork."""
    from reproduction.documentation import documentation
    from reproduction.new_tokenizers import convert_sentencepiece, train_tokenizer
    from statecut.models import create, save

    texts: list[str] = []
    if not options.data or not (options.model or options.tokenizer):
        texts = list(itertools.islice(documentation(), 3000))
    if not options.data:
        stream = itertools.cycle(word for text in texts for word in text.split())
        for task, (field, count, words) in WORDS.items():
            lines = [
                json.dumps({field: " ".join(itertools.islice(stream, words))}) + "\n"
                for _ in range(count)
            ]
            (options.work / f"{task}.jsonl").write_text("".join(lines))
    if not options.model:
        words = options.work / "tokenizer"
        if options.tokenizer:
            convert_sentencepiece(options.tokenizer, words)
        else:
            train_tokenizer(texts, words, vocabulary_size=8192)
        save(create(LAB, seed=0), options.work / "model", tokenizer=words)


def copies(source: Path, folder: Path, count: int) -> list[Path]:
    """The same model under as many digests: a line of config.json tells them apart."""
    found = [folder / f"model-{number}" for number in range(count)]
    for number, copy in enumerate(found):
        copy.mkdir(parents=True)
        for file in source.resolve().iterdir():
            (copy / file.name).symlink_to(file)
        (copy / "config.json").unlink()
        write_json(copy / "config.json", {**read_json(source / "config.json"), "copy": number})
    return found


def report(name: str, jobs: list[dict]) -> None:
    means = {key: statistics.fmean(one[key] for one in jobs) for key in jobs[0]}
    wall = max(one["wall"] for one in jobs)
    stages = "  ".join(f"{stage} {means[stage]:.2f}" for stage in [*STAGES, "other"])
    print(f"{name}: {means['wall']:.2f} s a job (the last {wall:.2f}), CPU {means['cpu']:.2f} s: "
          f"{stages}", flush=True)  # fmt: skip


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for models and texts")
    parser.add_argument("--jobs", type=int, default=2, help="at once")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--model", type=existing, help="model folder, instead of a random one")
    parser.add_argument("--data", type=existing, help="folder with the two test sets")
    parser.add_argument("--tokenizer", type=existing, help="sentencepiece's .model, for the random")
    parser.add_argument("--tuned", action="store_true", help="let Triton tune its kernels fully")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options)
        return
    if options.gpu and not GPU.exists():
        parser.error("--gpu: there is no GPU here")
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "made").is_file():
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--make"], check=True)
        (options.work / "made").touch()
    os.environ |= {"TOKENIZERS_PARALLELISM": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # fmt: skip
    os.environ.setdefault("TRITON_CACHE_DIR", str(options.work.resolve() / "triton"))
    for library in before_the_fork():
        importlib.import_module(library)
    print(f"{SOURCE}, {len(os.sched_getaffinity(0))} cores", flush=True)
    folder = options.work / "jobs"
    shutil.rmtree(folder, ignore_errors=True)
    models = copies(options.model or options.work / "model", folder, options.jobs + 1)
    report("the first, alone", together(models[:1], folder, options))
    report(f"{options.jobs} at once", together(models[1:], folder, options))


if __name__ == "__main__":
    main()
