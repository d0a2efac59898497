"""A model's perplexities through Statecut's suite, and by a page of plain PyTorch: are they equal?

    python benchmarks/perplexity.py MODEL --wikitext wiki.test.raw --lambada lambada.jsonl
        [--windows 2048,10000] [--batches 1,16] [--dtype bfloat16] [--gpu] [--out FILE]

The page is benchmarks/plain_perplexity.py: the recurrence, one token after the other, in float64.
It computes with the same weights, rounded to --dtype (float32 on a CPU, bfloat16 on a GPU), so a
difference is the rounding of what the suite computes in that type, and nothing else.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from arguments import existing
from plain_perplexity import PlainModel, lambada, pages, wikitext

from reproduction.config import Config, parse_config
from reproduction.suites.suite import evaluate
from statecut import logs
from statecut.files import write_json

DEMO = Path(__file__).parents[1] / "config" / "demo.yaml"
COLUMNS = {
    "wikitext_word_ppl": ("wikitext", "word_perplexity", 2),
    "lambada_ppl": ("lambada_openai", "perplexity", 1),
    "lambada_acc": ("lambada_openai", "acc", 1),
}


def one_suite(
    columns: dict[str, tuple[str, str, int]], files: dict[str, Path], window: int, batch: int | None
) -> Config:
    """The demo's configuration with one suite, `suite`, on local files."""
    data = yaml.safe_load(DEMO.read_text())
    tasks = {
        name: {"label": name, "task": task, "metric": metric, "version": version,
               "file": str(files[task])}
        for name, (task, metric, version) in columns.items()
    }  # fmt: skip
    suite = {"label": "suite", "window": window, "batch": batch, "tasks": tasks}
    data["evaluation"] = {"protocol": "benchmark", "suites": {"suite": suite}}
    data["tables"], data["figures"] = {}, {}
    return parse_config(data, "benchmark")


def cut(
    wikitext_file: Path, lambada_file: Path, articles: int | None, passages: int | None, work: Path
) -> dict[str, Path]:
    """Both test sets, or so many of their documents, as files."""
    lines = lambada_file.read_text(encoding="utf-8").strip().split("\n")
    files = {"wikitext": work / "wikitext.raw", "lambada_openai": work / "lambada.jsonl"}
    for file, some in zip(
        files.values(), (pages(wikitext_file)[:articles], lines[:passages]), strict=True
    ):
        file.write_text("\n".join(some), encoding="utf-8")
    return files


def compare(
    model: Path,
    wikitext_file: Path,
    lambada_file: Path,
    *,
    windows: list[int],
    batches: list[int],
    device: str,
    dtype: torch.dtype,
    articles: int | None = None,
    passages: int | None = None,
) -> list[dict]:
    """A row per number, window and batch size, printed as they come."""
    plain = PlainModel(model, dtype, device)
    rows = []
    with tempfile.TemporaryDirectory() as work:
        files = cut(wikitext_file, lambada_file, articles, passages, Path(work))
        for window in windows:
            started = time.monotonic()
            exact = dict(
                zip(
                    COLUMNS,
                    (
                        wikitext(plain, files["wikitext"], window),
                        *lambada(plain, files["lambada_openai"], window),
                    ),
                    strict=True,
                )
            )
            print(f"plain, window {window}: {time.monotonic() - started:.0f} s", flush=True)
            for batch in batches:
                started = time.monotonic()
                result = evaluate(
                    model, "suite", one_suite(COLUMNS, files, window, batch),
                    Path(work) / "out.json", cache=Path(work) / f"{window}-{batch}",
                    device=device, dtype=dtype,
                )  # fmt: skip
                print(f"suite, batch {batch}: {time.monotonic() - started:.0f} s", flush=True)
                for name, expected in exact.items():
                    found = result["results"][name]
                    rows.append({
                        "number": name, "window": window, "batch": batch,
                        "documents": result["tasks"][name]["documents"], "suite": found["value"],
                        "plain": expected, "stderr": found["stderr"],
                        "relative": abs(found["value"] / expected - 1) if expected else None,
                    })  # fmt: skip
                    print(line(rows[-1]), flush=True)
    return rows


def line(row: dict) -> str:
    relative = "" if row["relative"] is None else f"{row['relative']:.1e}"
    return (
        f"  {row['number']:<18} window {row['window']:>6} batch {row['batch']:>3}  "
        f"suite {row['suite']:.6g}  plain {row['plain']:.6g}  relative {relative}"
    )


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=existing, metavar="MODEL", help="model folder")
    parser.add_argument("--wikitext", type=existing, required=True, help="WikiText's raw test set")
    parser.add_argument("--lambada", type=existing, required=True, help="passages, one JSON a line")
    parser.add_argument("--windows", default="2048,10000")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--articles", type=int, help="so many of WikiText's, not all")
    parser.add_argument("--passages", type=int, help="so many of LAMBADA's, not all")
    parser.add_argument("--out", type=Path, help="also write the rows here")
    options = parser.parse_args()
    device = "cuda" if options.gpu else "cpu"
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.gpu else "float32"))
    print(f"{device}, {dtype}, {torch.get_num_threads()} threads", file=sys.stderr)
    rows = compare(
        options.model, options.wikitext, options.lambada,
        windows=[int(text) for text in options.windows.split(",")],
        batches=[int(text) for text in options.batches.split(",")],
        device=device, dtype=dtype, articles=options.articles, passages=options.passages,
    )  # fmt: skip
    largest = max(row["relative"] for row in rows if row["relative"] is not None)
    print(json.dumps({"largest relative difference": largest}))
    if options.out:
        write_json(options.out, {"device": device, "dtype": str(dtype), "rows": rows})


if __name__ == "__main__":
    main()
