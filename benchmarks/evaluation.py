"""Evaluation measured: against plain PyTorch, on two devices, and what state and batches are worth.

    python benchmarks/evaluation.py [--model FOLDER] [--parts throughput,padding]     on a CPU
    python benchmarks/evaluation.py --gpu --data FOLDER --work FOLDER --out FILE      on a GPU

The parts, each in processes of its own with a time limit:
  train       a DeltaNet of 12 million parameters, heads 128 wide, on DATA/tokens; else --model
  compare     WikiText and LAMBADA through the suite and by benchmarks/plain_perplexity.py
  paths       the same numbers by fla's kernels on the GPU and by plain PyTorch on the CPU, in bf16;
              without a GPU, bf16 and float32 on the CPU
  padding     prompts of many lengths in one batch, and each alone, against float64
  memory      a batch far too large for 2 GiB of a GPU, halved until it fits
  throughput  retrieval from the recurrent state and from the whole prefix, on a GPU also with every
              step launched from Python; multiple choice at the batch size found and one at a time

DATA holds wikitext2_test.raw and lambada_openai_test.jsonl; for `train` also tokens/ (made by
`statecut pack`) and tokenizer/; for `paths` it may hold demo/MODEL folders and demo/tasks/. Without
it, texts are the documentation of installed packages, and the model is a random one of the demo's
size. Triton's tuning is cut short (two configurations of each kernel) unless --tuned is given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from arguments import existing

WINDOW = 2048
# Documents of a kind, on a CPU and on a GPU; `paths` takes some of them.
COUNTS = {"articles": (6, 62), "passages": (40, 1500), "prompts": (8, 64), "questions": (100, 800)}
LENGTHS = (17, 64, 65, 100, 250, 600, 1200, 1990)  # prompts of `padding`; fla changes over at 64
SMALL = {"model_type": "delta_net", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2,
         "intermediate_size": 96, "vocab_size": 1024, "tie_word_embeddings": True}  # fmt: skip
LARGER = {"model_type": "delta_net", "hidden_size": 256, "num_hidden_layers": 4, "num_heads": 2,
          "intermediate_size": 768, "vocab_size": 32000, "tie_word_embeddings": True}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What a part is told."""

    model: str
    data: str | None
    work: str
    device: str
    dtype: str
    steps: int
    articles: int
    passages: int
    prompts: int
    questions: int
    tuned: bool


@dataclass(frozen=True)
class Job:
    name: str
    part: str
    settings: Settings
    limit: float  # seconds


# Texts and tasks


def texts(settings: Settings) -> Iterator[str]:
    if settings.data is None:
        from reproduction.documentation import documentation

        return iter(documentation())
    from plain_perplexity import pages

    return iter(pages(Path(settings.data) / "wikitext2_test.raw"))


def pieces(settings: Settings, words: int, count: int) -> list[list[str]]:
    """So many stretches of so many words, from the beginning of the texts on."""
    stream = (word for text in texts(settings) for word in text.split())
    found = [list(islice(stream, words)) for _ in range(count)]
    if len(found[-1]) < words:
        sys.exit(f"the texts are too short for {count} times {words} words")
    return found


def retrieval_documents(settings: Settings, tokenizer: Any) -> list[dict[str, Any]]:
    """NQ's form: eight words of a long text, and what came after them?"""
    from reproduction.suites.retrieval import cut

    draw = random.Random(0)
    documents = []
    for words in pieces(settings, 1400, settings.prompts):
        at = 100 + int(draw.random() * (len(words) - 200))
        while len(words[at + 8]) < 2:
            at += 1
        question = " ".join(words[at : at + 8])
        documents.append({
            "context": " ".join(words), "question": question, "answers": [words[at + 8]],
        })  # fmt: skip
    return cut(documents, "based_nq", tokenizer, WINDOW)


def choice_documents(settings: Settings) -> list[dict[str, Any]]:
    """HellaSwag's form: how the text goes on, and how three others do."""
    draw = random.Random(0)
    found = pieces(settings, 75, settings.questions)
    documents = []
    for words in found:
        others = [found[int(draw.random() * len(found))] for _ in range(3)]
        endings = [" ".join(other[60:]) for other in others]
        gold = int(draw.random() * 4)
        endings.insert(gold, " ".join(words[60:]))
        documents.append({
            "ctx_a": " ".join(words[:60]), "ctx_b": "", "activity_label": "Text",
            "endings": endings, "label": str(gold),
        })  # fmt: skip
    return documents


# The parts


def train(settings: Settings) -> dict[str, Any]:
    from reproduction.config.training import Recipe
    from reproduction.pretraining.pretrain import pretrain
    from statecut.data.packing import PackedTokens
    from statecut.models import create
    from statecut.recovery.checkpoints import Output

    data, work = Path(str(settings.data)), Path(settings.work)
    tokens = PackedTokens(data / "tokens")
    batch = 16
    recipe = Recipe.model_validate(
        {
            "trainer": "builtin", "data": "text/all", "epochs": 20, "steps": settings.steps,
            "batch": batch, "learning_rate": 3e-3, "warmup": settings.steps // 10, "floor": 0.1,
            "eps": 1e-15, "clip": 1.0, "seed": 0,
        }
    )  # fmt: skip
    model = create(LARGER, seed=0).to(settings.device)
    started = time.monotonic()
    output = Output(settings.model, work / "checkpoints", tokenizer=data / "tokenizer", force=True)
    pretrain(model, tokens, recipe, output)
    rows = (Path(settings.model) / "loss.csv").read_text().splitlines()
    losses = [float(row.split(",")[2]) for row in rows[1:]]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": settings.steps, "tokens": settings.steps * batch * tokens.manifest.sequence_length,
        "seconds": time.monotonic() - started,
        "first_loss": losses[0], "last_loss": sum(losses[-10:]) / len(losses[-10:]),
    }  # fmt: skip


def compare(settings: Settings) -> dict[str, Any]:
    import torch
    from perplexity import compare as side_by_side

    rows = side_by_side(
        Path(settings.model), *test_sets(settings), windows=[2048, 10_000], batches=[1, 16],
        device=settings.device, dtype=getattr(torch, settings.dtype),
        articles=settings.articles, passages=settings.passages,
    )  # fmt: skip
    return {"rows": rows}


def test_sets(settings: Settings) -> tuple[Path, Path]:
    data = Path(str(settings.data))
    return data / "wikitext2_test.raw", data / "lambada_openai_test.jsonl"


def paths(settings: Settings) -> dict[str, Any]:
    """The numbers of one model on one device; `report` puts them side by side."""
    import torch
    from perplexity import COLUMNS, cut, one_suite

    from reproduction.suites.suite import evaluate
    from statecut.data.tokenizer import load_tokenizer

    work = Path(settings.work) / f"paths-{os.getpid()}"
    work.mkdir(parents=True)
    demo = Path(str(settings.data)) / "demo"
    if Path(settings.model).parent == demo:
        window = 128
        columns = {
            "prose_word_ppl": ("demo_prose", "word_perplexity", 1),
            "last_word_ppl": ("demo_last_word", "perplexity", 1),
            "last_word_acc": ("demo_last_word", "acc", 1),
            "choice_acc_norm": ("demo_choice", "acc_norm", 1),
            "recall_contains": ("demo_recall", "contains", 1),
        }
        files = {task: demo / "tasks" / f"{task}.jsonl" for task, _, _ in columns.values()}
    else:
        window = WINDOW
        columns = {
            **COLUMNS,
            "choice_acc_norm": ("hellaswag", "acc_norm", 1),
            "retrieval_contains": ("based_nq", "contains", 1),
        }
        files = cut(*test_sets(settings), settings.articles, settings.passages, work)
        made = {
            "hellaswag": choice_documents(settings),
            "based_nq": retrieval_documents(settings, load_tokenizer(settings.model)),
        }
        for task, documents in made.items():
            files[task] = work / f"{task}.jsonl"
            files[task].write_text("".join(json.dumps(one) + "\n" for one in documents))
    result = evaluate(
        settings.model, "suite", one_suite(columns, files, window, None), work / "out.json",
        cache=work / "cache", device=settings.device, dtype=getattr(torch, settings.dtype),
    )  # fmt: skip
    for name, found in result["results"].items():
        print(f"{name:<20} {found['value']:.6g} +- {found['stderr']:.2g}", flush=True)
    return {key: result[key] for key in ("results", "device", "dtype", "window", "model")} | {
        "documents": {name: task["documents"] for name, task in result["tasks"].items()}
    }


def language_model(settings: Settings, kind: Any = None, **more: Any) -> Any:
    import torch

    from reproduction.suites.language_model import LanguageModel

    return (kind or LanguageModel)(
        settings.model, window=WINDOW, device=settings.device,
        dtype=getattr(torch, settings.dtype), **more,
    )  # fmt: skip


def padding(settings: Settings) -> dict[str, Any]:
    """Errors of the logits after a prompt, relative to float64, and what is then written."""
    import torch
    from plain_perplexity import PlainModel

    lm = language_model(settings)
    plain = PlainModel(settings.model, getattr(torch, settings.dtype), settings.device)
    text = " ".join(" ".join(words) for words in pieces(settings, 1400, 4))
    ids = lm.tok_encode(text)
    starts = range(0, 100 * len(LENGTHS), 100)
    prompts = [
        (ids[start : start + length], ("\0",), 16)
        for start, length in zip(starts, LENGTHS, strict=True)
    ]
    with torch.no_grad():
        exact = [
            plain.logits(plain.hidden(torch.tensor([row], device=settings.device))[0, -1])
            for row, _, _ in prompts
        ]
    seen: list[Any] = []
    logits = lm._logits

    def watched(states: Any) -> Any:
        seen.append(logits(states))
        return seen[-1]

    lm._logits = watched
    together = lm._continued(prompts)
    padded = list(seen[0][0].double())
    lm.grain = 1  # or one alone would be padded as well
    alone, texts_alone = [], []
    for prompt in prompts:
        seen.clear()
        texts_alone += lm._continued([prompt])
        alone.append(seen[0][0][0].double())
    rows = []
    for length, a, b, c in zip(LENGTHS, padded, alone, exact, strict=False):
        rows.append({
            "tokens": length,
            "padded": float((a - c).norm() / c.norm()), "alone": float((b - c).norm() / c.norm()),
        })  # fmt: skip
        print(f"{length:>5} tokens: relative error of logits {rows[-1]['padded']:.1e} in a batch, "
              f"{rows[-1]['alone']:.1e} alone", flush=True)  # fmt: skip
    same = sum(a == b for a, b in zip(together, texts_alone, strict=True))
    print(f"the same 16 tokens written: {same} of {len(prompts)}", flush=True)
    return {"rows": rows, "same_texts": same, "prompts": len(prompts)}


def memory(settings: Settings) -> dict[str, Any]:
    """LAMBADA in one batch, with 2 GiB for it: the allocator refuses, the batch is halved."""
    import torch

    _, passages = test_sets(settings)
    lm = language_model(settings, batch=16)
    lines = passages.read_text(encoding="utf-8").strip().split("\n")
    rows = []
    for line in lines:
        ids = lm.tok_encode(json.loads(line)["text"])
        rows.append(((), ids[:-1], ids[-1:]))
    expected = lm._loglikelihood_tokens(rows)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    room = 2 << 30
    torch.cuda.set_per_process_memory_fraction(
        room / torch.cuda.get_device_properties(0).total_memory
    )
    lm.batch, lm.tokens_at_once = None, 1 << 20
    computed: list[int] = []
    refused: list[int] = []
    scores = lm._scores

    def watched(some: Any) -> Any:
        try:
            result = scores(some)
        except torch.OutOfMemoryError:
            refused.append(len(some))
            raise
        computed.append(len(some))
        return result

    lm._scores = watched
    found = lm._loglikelihood_tokens(rows)
    differences = [a - b for (a, _), (b, _) in zip(found, expected, strict=True)]
    result = {
        "requests": len(rows),
        "refused": refused,
        "computed": computed,
        "tokens_at_once": lm.tokens_at_once,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "largest_difference_nats": max(map(abs, differences)),
        "mean_difference_nats": sum(differences) / len(rows),
    }
    print(json.dumps(result), flush=True)
    return result


def recomputing() -> Any:
    import torch

    from reproduction.suites.language_model import LanguageModel

    class Recomputing(LanguageModel):
        """Without a recurrent state: the whole prefix is read again for every token."""

        def _tokens(self, ids: Any, mask: Any) -> Iterator[list[int]]:
            ids, mask = (None if x is None else x.to(self._device) for x in (ids, mask))
            while True:
                hidden = self.model.model(ids, attention_mask=mask, use_cache=False)[0]
                best = self._logits(hidden[:, -1])[1]
                yield best.tolist()
                ids = torch.cat([ids, best[:, None]], 1)
                if mask is not None:
                    mask = torch.cat([mask, torch.ones_like(best)[:, None]], 1)

    return Recomputing


def launching() -> Any:
    from unittest.mock import patch

    from reproduction.generation import GreedyGeneration
    from reproduction.suites import language_model

    def steps(*start: Any) -> Iterator[Any]:
        generation = GreedyGeneration(*start)
        while True:
            yield generation.run(1)

    class Launching(language_model.LanguageModel):
        """Every step launched from Python, none of them replayed."""

        def _continued(self, prompts: Any) -> list[str]:
            with patch.object(language_model, "generate", steps):
                return super()._continued(prompts)

    return Launching


def unstoppable(lm: Any) -> None:
    """Every answer has all its 48 tokens: how soon a model stops is not what is measured."""

    def finished(ids: list[int], until: tuple[str, ...], limit: int) -> str | None:
        return lm.tokenizer.backend.decode(ids) if len(ids) == limit else None

    lm._finished = finished


def throughput(settings: Settings) -> dict[str, Any]:
    from reproduction.suites.harness import measure

    found = language_model(settings)
    # On a GPU the first run compiles kernels. A busy machine takes nothing from CPU seconds.
    runs, clock = (2, time.perf_counter) if settings.device == "cuda" else (1, time.process_time)
    retrieval = retrieval_documents(settings, found.tokenizer)
    choices = choice_documents(settings)
    cases = {
        "retrieval_state": (found, "based_nq", retrieval),
        "retrieval_prefix": (language_model(settings, recomputing()), "based_nq", retrieval),
        "zero_shot_found": (found, "hellaswag", choices),
        "zero_shot_single": (language_model(settings, batch=1), "hellaswag", choices),
    }
    if settings.device == "cuda":
        cases["retrieval_launched"] = (language_model(settings, launching()), "based_nq", retrieval)
    for lm, task, _ in cases.values():
        if task == "based_nq":
            unstoppable(lm)
    seconds, values = {}, {}
    for name, (lm, task, documents) in cases.items():
        times = []
        for _ in range(runs):
            started = clock()
            record = measure(lm, task, documents)
            times.append(clock() - started)
        seconds[name] = min(times)
        values[name] = {key: one["value"] for key, one in record["metrics"].items()}
        print(f"{name}: {seconds[name]:.2f} s for {len(documents)} documents, {values[name]}",
              flush=True)  # fmt: skip
    ratios = {
        "retrieval, state over prefix": seconds["retrieval_prefix"] / seconds["retrieval_state"],
        "zero_shot, found batch over 1": seconds["zero_shot_single"] / seconds["zero_shot_found"],
    }
    if settings.device == "cuda":
        launched = seconds["retrieval_launched"]
        ratios["retrieval, replayed over launched"] = launched / seconds["retrieval_state"]
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.1f} times the throughput", flush=True)
    return {"seconds": seconds, "values": values, "ratios": ratios, "prompts": len(retrieval),
            "questions": len(choices), "tokens_at_once": found.tokens_at_once}  # fmt: skip


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "train": train,
    "compare": compare,
    "paths": paths,
    "padding": padding,
    "memory": memory,
    "throughput": throughput,
}
# Side by side on a GPU, which they do not fill, each with a limit; what is timed is alone.
STAGES = (("train",), ("compare", "paths", "padding", "memory"), ("throughput",))
LIMITS = {"train": 240, "compare": 240, "paths": 240, "padding": 150, "memory": 150,
          "throughput": 150}  # fmt: skip


# One process per part


def child(name: str, settings: Settings, out: Path) -> None:
    from statecut import logs

    logs.start()
    sys.path.insert(0, str(Path(__file__).parent))
    if settings.device == "cuda" and not settings.tuned:
        quickly_tuned()
    out.write_text(json.dumps(PARTS[name](settings)))


def quickly_tuned() -> None:
    """Triton times all configurations of a kernel for every new shape, for minutes. Any of them is
    right: the first and the last are enough here (one may need more than the GPU has)."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.prune_configs = lambda self, _: [self.configs[0], self.configs[-1]]


def run(job: Job, deadline: float, threads: dict[str, str]) -> dict[str, Any]:
    out = Path(job.settings.work) / f"{job.name.replace(':', '-')}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", job.part, json.dumps(asdict(job.settings)), out]
    hidden = {} if job.settings.device == "cuda" else {"CUDA_VISIBLE_DEVICES": "", **threads}
    started = time.monotonic()
    going = subprocess.Popen(
        list(map(str, command)), env={**os.environ, **hidden}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    timer = threading.Timer(max(1.0, min(job.limit, deadline - started)), going.kill)
    timer.start()
    lines = []
    assert going.stdout is not None
    for line in going.stdout:
        lines.append(line)
        print(f"[{job.name}] {line}", end="", flush=True)
    code = going.wait()
    timer.cancel()
    took = time.monotonic() - started
    result = json.loads(out.read_text()) if out.is_file() else {"failed": "".join(lines[-20:])}
    print(f"[{job.name}] {'done' if code == 0 else f'ended with {code}'} in {took:.0f} s",
          flush=True)  # fmt: skip
    return {**result, "wall_seconds": took, "exit_code": code}


def jobs(stage: tuple[str, ...], settings: Settings, gpu: bool) -> list[Job]:
    def limit(part: str) -> float:
        return LIMITS[part] if gpu else math.inf

    found = []
    for part in stage:
        if part != "paths":
            found.append(Job(part, part, settings, limit(part)))
            continue
        demo = Path(settings.data) / "demo" if settings.data else None
        folders = sorted(demo.glob("*/config.json")) if demo else []
        for model in dict.fromkeys((settings.model, *(str(file.parent) for file in folders))):
            # A CPU computes the larger model too: some of the documents have to do.
            ways = (("cuda", "bfloat16"), ("cpu", "bfloat16")) if gpu else (
                ("cpu", "bfloat16"), ("cpu", "float32"))  # fmt: skip
            for device, dtype in ways:
                told = {**asdict(settings), "model": model, "device": device, "dtype": dtype}
                told |= {"articles": settings.articles // 6, "passages": settings.passages // 4}
                told |= {"prompts": settings.prompts // 4, "questions": settings.questions // 8}
                name = f"paths:{Path(model).name}:{device}:{dtype}"
                found.append(Job(name, part, Settings(**told), limit(part)))
    return found


def side_by_side(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The numbers of `paths`: a row per model and number."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, result in found.items():
        if name.startswith("paths:") and "results" in result:
            _, model, device, dtype = name.split(":")
            for number, one in result["results"].items():
                row = rows.setdefault((model, number), {"model": model, "number": number})
                row[f"{device} {dtype}"] = one["value"]
                row["stderr"] = one["stderr"]
    for row in rows.values():
        values = [value for key, value in row.items() if " " in key]
        print("  ".join(f"{k} {v:.6g}" if isinstance(v, float) else str(v) for k, v in row.items()))
        if len(values) == 2 and values[1] and math.isfinite(values[1]):
            row["relative"] = values[0] / values[1] - 1
    return list(rows.values())


def random_model(folder: Path) -> Path:
    """The demo's DeltaNet, untrained: its speed is the same."""
    from reproduction.documentation import documentation
    from reproduction.new_tokenizers import train_tokenizer
    from statecut.models import create, save

    train_tokenizer(islice(documentation(), 2000), folder / "words", vocabulary_size=1024)
    save(create(SMALL, seed=0), folder / "random", tokenizer=folder / "words")
    return folder / "random"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--parts", help="by default all that the options allow")
    parser.add_argument("--model", type=existing, help="model folder; on a GPU `train` makes one")
    parser.add_argument("--data", type=existing, help="folder with test sets and, to train, tokens")
    parser.add_argument("--work", type=Path, help="folder for models and caches; kept if given")
    parser.add_argument("--out", type=Path, help="JSON, written again after every stage")
    parser.add_argument("--steps", type=int, default=400, help="of training")
    for name, (cpu, gpu) in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"how many; {cpu}, or {gpu} on a GPU")
    parser.add_argument("--deadline", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--tuned", action="store_true", help="let Triton tune its kernels fully")
    options = parser.parse_args()
    work = options.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.deadline
    parts = allowed(options)
    if options.model is None and "train" not in parts:
        options.model = work / "model" if (work / "model").exists() else random_model(work)
    settings = Settings(
        model=str(options.model or work / "model"),
        data=options.data and str(options.data),
        work=str(work),
        device="cuda" if options.gpu else "cpu",
        dtype="bfloat16" if options.gpu else "float32",
        steps=options.steps,
        **{name: getattr(options, name) or count[options.gpu] for name, count in COUNTS.items()},
        tuned=options.tuned,
    )
    found: dict[str, Any] = {"settings": asdict(settings)}
    for stage in STAGES:
        todo = jobs(tuple(part for part in stage if part in parts), settings, options.gpu)
        in_stage(todo, found, deadline, together=options.gpu)
        if not Path(settings.model).exists():
            sys.exit("no model was trained: see above")
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    found["side_by_side"] = side_by_side(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    failed = [name for name, one in found.items() if isinstance(one, dict) and one.get("exit_code")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def allowed(options: argparse.Namespace) -> list[str]:
    parts = options.parts.split(",") if options.parts else list(PARTS)
    needs_data = {"train", "compare", "paths", "memory"}
    reasons = {part: "give --data" for part in needs_data if options.data is None} | (
        {} if options.gpu else {"memory": "only a GPU refuses memory", "train": "give --gpu"}
    )
    for part in parts:
        if part not in PARTS:
            sys.exit(f"no part {part!r}; there are {', '.join(PARTS)}")
        if part in reasons:
            if options.parts:
                sys.exit(f"{part}: {reasons[part]}")
            print(f"{part} is left out: {reasons[part]}", flush=True)
    if options.model is not None:
        reasons["train"] = "a model is given"
    return [part for part in parts if part not in reasons]


def in_stage(todo: list[Job], found: dict[str, Any], deadline: float, together: bool) -> None:
    # Together, those on the CPU share its cores.
    share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4))} if together else {}

    def one(job: Job) -> None:
        found[job.name] = run(job, deadline, share)

    threads = [threading.Thread(target=one, args=(job,)) for job in todo]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        child(sys.argv[2], Settings(**json.loads(sys.argv[3])), Path(sys.argv[4]))
    else:
        main()
