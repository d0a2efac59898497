"""What a narrower state gives in vLLM: tokens per second, time per token, requests that fit.

    python benchmarks/serving_speed.py --out FILE.json

A model with the shapes of Qwen3.5-4B (24 of 32 layers with a delta rule, 16 heads of keys, 32 of
values) and no weights of its own (vLLM's `dummy` format) is served at each width, in a process of
its own, one after the other. `short` is 1,024 requests of 128 tokens, `long` 128 of 4,096; each is
answered with 256 tokens. What vLLM itself logs about its cache is kept with the figures.
`--warm-up` only starts the engines, side by side, so that their compiled code is in vLLM's cache.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from transformers import AutoConfig

WIDTHS = ("128x128", "96x128", "64x128", "32x128", "64x64")
LOADS = {"short": (1024, 128), "long": (128, 4096)}
GENERATED = 256
TEXT = {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
}
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
    """In a process of its own: the figures of one width."""
    import random

    import vllm

    memory = settings["cache_gb"] and {"kv_cache_memory_bytes": int(settings["cache_gb"] * 1e9)}
    begin = time.perf_counter()
    engine = vllm.LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4352,
        max_num_seqs=1024,
        enable_prefix_caching=settings["prefix_cache"],
        mamba_ssm_cache_dtype=settings["state"],
        disable_log_stats=False,
        **memory or {},
        language_model_only=True,
        **arguments,
    )
    figures = {"start_s": time.perf_counter() - begin, "version": vllm.__version__}
    options = vllm.SamplingParams(
        temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False
    )
    draw = random.Random(3)
    for name, (requests, length) in LOADS.items() if not settings["warm_up"] else ():
        drawn = [[draw.randrange(1000) for _ in range(length)] for _ in range(requests)]
        prompts = [{"prompt_token_ids": ids} for ids in drawn]
        engine.generate(prompts[:8], options, use_tqdm=False)  # the first requests compile kernels
        begin = time.perf_counter()
        outputs = engine.generate(prompts[8:], options, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        per_token = [
            (o.metrics.last_token_ts - o.metrics.first_token_ts) / (GENERATED - 1) for o in outputs
        ]
        figures[name] = {
            "requests": len(outputs),
            "tokens_per_s": tokens / seconds,
            "ms_per_token": 1000 * sum(per_token) / len(per_token),
        }
    return figures


def measure(root, settings, arguments):
    name = "-".join(map(str, settings.values()))
    folder = root / name
    make(settings["width"], folder)
    given = json.dumps([str(folder), settings, arguments])
    with open(f"{folder}.log", "w") as log:
        command = [sys.executable, __file__, "--serve"]
        done = subprocess.run(command, input=given, stdout=log, stderr=log, text=True)
    log = Path(f"{folder}.log").read_text(errors="replace")
    if done.returncode:
        return {**settings, "error": [line for line in log.splitlines() if "Error" in line][-3:]}
    logged = {key: re.findall(line, log) for key, line in LINES.items()}
    numbers = {key: float(value[-1]) for key, value in logged.items() if value}
    return {**settings, **json.loads((folder / "figures.json").read_text()), "vllm_logs": numbers}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="*", default=WIDTHS, help="d_k x d_v, such as 64x128")
    parser.add_argument("--states", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--prefix-cache", nargs="*", type=int, default=[0, 1], help="0, 1 or both")
    parser.add_argument("--cache-gb", type=float, help="(default: all memory that is left)")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of vLLM, as JSON")
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help="start N side by side")
    parser.add_argument("--logs", type=Path, help="logs stay there (default: nowhere)")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder, settings, arguments = json.load(sys.stdin)
        figures = serve(folder, settings, arguments)
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
        os._exit(0)  # engines end slowly
    cells = [
        {"width": width, "state": state, "prefix_cache": bool(cached),
         "cache_gb": options.cache_gb, "warm_up": bool(options.warm_up)}
        for cached, state, width in product(options.prefix_cache, options.states, options.widths)
    ]  # fmt: skip
    rows = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        ThreadPoolExecutor(options.warm_up or 1) as pool,
    ):
        root = options.logs or Path(temporary)
        for row in pool.map(lambda cell: measure(root, cell, options.arguments), cells):
            print(json.dumps(row), flush=True)
            rows.append(row)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
