"""What a narrower state gives in vLLM: tokens per second, time per token, requests that fit.

    python benchmarks/serving_speed.py --out FILE.json

A model with the shapes of Qwen3.5-4B (24 of 32 layers with a delta rule, 16 heads of keys, 32 of
values) and no weights of its own (vLLM's `dummy` format) is served at each width, in a process of
its own. Engines start side by side, since that takes a minute or two, and are measured one after
the other while the rest wait. Each has `--cache-gb` for states and attention. Timed are 1,024
requests with prompts of 128 tokens (`short`) or 160 with 4,096 (`long`), all given at once, and 256
tokens generated for each. How fast that is depends on the CPU as well (`gpu_busy_percent`);
`step_ms` is what the GPU takes for one token of 64 or 160 requests, the choice of the token apart.
What vLLM itself logs about its cache is kept with the figures. vLLM records CUDA graphs for at most
512 requests unless told otherwise; with narrow states more run at once, so they are recorded for
all that vLLM lets in here (`--most`).

`--table` prints what a file holds, and `--figure` draws it:

    python benchmarks/serving_speed.py --table benchmarks/h200/serving_speed.json \
        --figure docs/results/serving.svg
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean, median

from rows import existing, markdown, save_for_page
from transformers import AutoConfig

WIDTHS = ("128x128", "96x128", "64x128", "32x128", "64x64")
LOADS = {"short": (1024, 128), "long": (160, 4096)}  # requests, tokens of a prompt
GENERATED = 256  # tokens
STEPS, TOKENS = (64, 160), 96  # requests, and tokens of each
METRICS = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
SHOWN = {"at_once": ".0f", "tokens_per_s": ",.0f"}
LABELS = {"at_once": "requests at once", "tokens_per_s": "tokens per second"}
CURVES = {  # load, state, colour
    "128 + 256 tokens, float32": ("short", "float32", "#c2455a"),
    "128 + 256, bfloat16": ("short", "bfloat16", "#2f93a8"),
    "4,096 + 256, float32": ("long", "float32", "#7a6bc4"),
}
TEXT = {
    "hidden_size": 2560, "num_hidden_layers": 32,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "vocab_size": 248320, "intermediate_size": 9216, "tie_word_embeddings": True,
}  # fmt: skip
LINES = {
    "cache_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "block_tokens": r"Setting attention block size to (\d+) tokens",
    "requests": r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x",
}


def make(width, folder):
    keys, values = map(int, width.split("x"))
    text = {**TEXT, "linear_key_head_dim": keys, "linear_value_head_dim": values}
    config = AutoConfig.for_model("qwen3_5", text_config=text, tie_word_embeddings=True)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def serve(folder, settings, arguments):
    """In a process of its own: starts an engine, waits until it is its turn, measures."""
    import vllm

    begin = time.perf_counter()
    engine = vllm.LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4352,
        max_num_seqs=settings["most"],
        compilation_config={"max_cudagraph_capture_size": settings["most"]},
        enable_prefix_caching=settings["prefix_cache"],
        mamba_ssm_cache_dtype=settings["state"],
        disable_log_stats=False,
        kv_cache_memory_bytes=int(settings["cache_gb"] * 1e9),
        gpu_memory_utilization=0.05,  # not used, but checked
        language_model_only=True,
        **arguments,
    )
    figures = {"start_s": time.perf_counter() - begin, "version": vllm.__version__}
    (folder / "ready").touch()
    sys.stdin.readline()
    draw = random.Random(3)
    if settings["loads"]:
        figures["step_ms"] = {requests: step(engine, draw, requests) for requests in STEPS}
    for name in settings["loads"]:
        figures[name] = measure(engine.llm_engine, draw, *LOADS[name])
    (folder / "figures.json").write_text(json.dumps(figures))
    engine.llm_engine.engine_core.shutdown()  # which is a process of its own


def watch(worker):
    """In vLLM's process: keeps the time that the GPU takes for each CUDA graph."""
    import torch

    worker.replay = replay = torch.cuda.CUDAGraph.replay
    worker.replays = []

    def timed(graph):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay(graph)
        end.record()
        worker.replays.append((begin, end))

    torch.cuda.CUDAGraph.replay = timed


def watched(worker):
    import torch

    torch.cuda.synchronize()
    torch.cuda.CUDAGraph.replay = worker.replay
    return [begin.elapsed_time(end) for begin, end in worker.replays]


def step(engine, draw, requests):
    """Milliseconds of the GPU that one token of each request takes, after 128 of a prompt. It is
    one graph of the whole model; without the choice of the token, and what the CPU does."""
    prompts = [prompt(draw, 128) for _ in range(requests)]
    engine.collective_rpc(watch)
    engine.generate(prompts, sampling(TOKENS), use_tqdm=False)
    (times,) = engine.collective_rpc(watched)
    return median(times[-3 * TOKENS // 4 : -TOKENS // 4])  # when all of them decode


def prompt(draw, length):
    return {"prompt_token_ids": [draw.randrange(1000) for _ in range(length)]}


def sampling(tokens):
    import vllm
    from vllm.sampling_params import RequestOutputKind

    options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    options["output_kind"] = RequestOutputKind.FINAL_ONLY
    return vllm.SamplingParams(max_tokens=tokens, **options)


def measure(engine, draw, requests, length):
    """Tokens per second until all requests are answered, and how many ran at once meanwhile."""
    prompts = [prompt(draw, length) for _ in range(requests)]
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*command, "-l", "1"], stdout=subprocess.PIPE, text=True) as busy:
        begin, counts = time.perf_counter(), []
        for place, given in enumerate(prompts):
            engine.add_request(str(place), given, sampling(GENERATED))
        while engine.has_unfinished_requests():
            engine.step()
            if time.perf_counter() - begin > len(counts) / 4:
                counts.append(count(engine))
        seconds = time.perf_counter() - begin
        busy.terminate()
        percent = [int(line) for line in busy.stdout.read().split()]
    full = [one["running"] for one in counts if one["waiting"]]  # no more would fit
    rate = requests * GENERATED / seconds
    return {"tokens_per_s": rate, "at_once": median(full), "gpu_busy_percent": mean(percent)}


def count(engine):
    found = {metric.name: metric for metric in engine.get_metrics()}
    return {key: found[name].value for key, name in METRICS.items()}


def start(root, settings, arguments):
    """A process that serves, and its folder."""
    names = (settings["width"], settings["state"], f"prefix_cache-{settings['prefix_cache']}")
    folder = root / "-".join(names)
    make(settings["width"], folder)
    command = [sys.executable, __file__, "--serve", json.dumps([str(folder), settings, arguments])]
    environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for `watch`
    with open(f"{folder}.log", "w") as log:
        options = {
            "env": environment,
            "stdin": subprocess.PIPE,
            "stdout": log,
            "stderr": log,
            "text": True,
        }
        return subprocess.Popen(command, **options), folder


def result(process, folder):
    """What a process measures, or what went wrong."""
    process.communicate("go\n")
    log = Path(f"{folder}.log").read_text(errors="replace")
    if process.returncode:
        return {"error": [line for line in log.splitlines() if "Error" in line][-3:]}
    logged = {key: re.findall(line, log) for key, line in LINES.items()}
    numbers = {key: float(value[-1]) for key, value in logged.items() if value}
    return {**json.loads((folder / "figures.json").read_text()), "vllm_logs": numbers}


def state_mib(row):
    """Of one request, all layers."""
    keys, values = map(int, row["width"].split("x"))
    layers = TEXT["layer_types"].count("linear_attention")
    size = 4 if row["state"] == "float32" else 2
    return layers * TEXT["linear_num_value_heads"] * keys * values * size / 2**20


def tables(rows):
    """One for each type of state, without and with prefix caching; in brackets, the part of what
    the first row has."""
    same = {(row["state"], row["prefix_cache"]): [] for row in rows}
    for row in rows:
        same[row["state"], row["prefix_cache"]].append(row)
    return [table(some) for some in same.values()]


def table(rows):
    loads = [load for load in LOADS if load in rows[0]]
    columns = ["d_k x d_v", "state, MiB", "requests of 4,352 tokens"]
    columns += ["step of 64, ms", "of 160, ms"]
    for load in loads:
        columns += [f"{load}: at once", "tokens/s", "GPU busy"]

    def cell(row, form, *path):
        value, whole = row, rows[0]
        for key in path:
            value, whole = value[key], whole[key]
        return format(value, form) + (f" ({value / whole:.2f})" if row is not rows[0] else "")

    def cells(row):
        yield from (row["width"], f"{state_mib(row):g}", cell(row, ".1f", "vllm_logs", "requests"))
        yield from (cell(row, ".2f", "step_ms", str(requests)) for requests in STEPS)
        for load in loads:
            yield from (cell(row, form, load, key) for key, form in SHOWN.items())
            yield f"{row[load]['gpu_busy_percent']:.0f} %"

    return markdown(" | ".join(columns), map(cells, rows))


def draw(rows, out):
    """Requests at once and tokens per second against the state of a request."""
    from reproduction.reporting.style import PAGE, drawing, new_figure

    with drawing():
        figure = new_figure(PAGE, 2.4)
        panels = figure.subplots(1, 2)
        for panel, (key, label) in zip(panels, LABELS.items(), strict=True):
            for name, (load, state, colour) in CURVES.items():
                some = [r for r in rows if r["state"] == state and not r["prefix_cache"]]
                points = {r["width"]: (state_mib(r), r[load][key]) for r in some if load in r}
                square = points.pop("64x64")
                line = zip(*points.values(), strict=True)
                panel.plot(*line, color=colour, marker="o", markersize=3)
                panel.plot(*square, color=colour, marker="D", markersize=4)
                if panel is panels[1]:
                    whole = points["128x128"]
                    place = {"xytext": (6, -2), "textcoords": "offset points", "fontsize": 7}
                    panel.annotate(name, whole, color=colour, annotation_clip=False, **place)
            panel.set_title(label)
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks([6, 12, 24, 36, 48], [6, 12, 24, 36, 48])
            panel.minorticks_off()
            panel.set_xlabel("recurrent state of a request, MiB")
        panels[0].set_yticks([50, 100, 200, 400, 600], [50, 100, 200, 400, 600])
        panels[1].set_yticks(
            [2500, 5000, 10000, 20000, 30000], ["2,500", "5,000", "10,000", "20,000", "30,000"]
        )
        save_for_page(figure, out)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="*", default=WIDTHS, help="d_k x d_v, such as 64x128")
    parser.add_argument("--states", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--prefix-cache", nargs="*", type=int, default=[0, 1], help="0, 1 or both")
    loads = "(default: both; with none, engines only start)"
    parser.add_argument("--loads", nargs="*", default=[*LOADS], choices=LOADS, help=loads)
    parser.add_argument("--cache-gb", type=float, default=20, help="of one engine (default: 20)")
    parser.add_argument("--at-once", type=int, default=4, help="that start together (default: 4)")
    most = "requests at once, at most; not more than the cache has blocks (default: 640)"
    parser.add_argument("--most", type=int, default=640, help=most)
    parser.add_argument("--arguments", type=json.loads, default={}, help="of vLLM, as JSON")
    parser.add_argument("--logs", type=Path, help="logs stay there (default: nowhere)")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--table", type=existing, metavar="FILE", help="print what it holds")
    parser.add_argument("--figure", type=Path, help="draw what the file of --table holds: .svg")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        found = json.loads(options.table.read_text())
        print(*tables(found), sep="\n\n")
        if options.figure:
            draw(found, options.figure)
        return
    if options.serve:
        folder, *settings = options.serve
        serve(Path(folder), *settings)
        os._exit(0)  # engines end slowly
    rows = []

    def keep(row):
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))

    same = {"loads": options.loads, "cache_gb": options.cache_gb, "most": options.most}
    chosen = product(options.prefix_cache, options.states, options.widths)
    cells = [
        {"width": width, "state": state, "prefix_cache": bool(cached), **same}
        for cached, state, width in chosen
    ]
    with tempfile.TemporaryDirectory() as temporary:
        root = options.logs or Path(temporary)
        for first in range(0, len(cells), options.at_once):
            some = cells[first : first + options.at_once]
            started = [start(root, cell, options.arguments) for cell in some]
            while any(p.poll() is None and not (f / "ready").exists() for p, f in started):
                time.sleep(0.2)
            for cell, engine in zip(some, started, strict=True):
                keep({**cell, **result(*engine)})


if __name__ == "__main__":
    main()
