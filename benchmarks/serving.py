"""Are pruned models computed right by a serving engine? Tiny models with random weights, on a GPU.

    python benchmarks/serving.py vllm                 with Statecut's plugin where that is installed
    VLLM_PLUGINS= python benchmarks/serving.py vllm   vLLM as it is
    python benchmarks/serving.py sglang
    python benchmarks/serving.py --table benchmarks/h200/serving.json    as Markdown

Each family that the engine knows is served whole and cut, in a process of its own: two prompts at
once, longer than the engine's chunk of a prefill, and the same prompts again, with prefix caching
and CUDA graphs on. Compared with Statecut's float32 model on a CPU: the log-probabilities of the
prompts' tokens (prefill), of the greedy tokens that follow (decoding), and of those when the prompt
comes from the cache. "right" is a median error of at most a twentieth of the effect of the delta
layers: what it costs the log-probabilities to put out zeros there. Rows have means, too: in 16 bits
some tokens are routed to other experts than in float32, in an unpruned model as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

import torch
from rows import existing, markdown

SHAPES = ("128x128", "96x128", "64x128", "32x128", "20x128", "64x64", "32x64", "128x64")
PROMPTS, GENERATED, CHUNK = (400, 150), 24, 192
RIGHT = 0.05  # of the effect of the delta layers
TEXT = {
    "hidden_size": 256, "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 256, "vocab_size": 1024, "intermediate_size": 512,
    "initializer_range": 0.1,  # logits far from zero
    "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
    "out_hidden_size": 256, "num_position_embeddings": 16,
}  # fmt: skip
LATENT = {  # of Kimi Linear: delta rules of one width for keys and values, and MLA
    **{key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{key: TEXT[key] for key in ("vocab_size", "intermediate_size", "initializer_range")},
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    },
    "mlp_layer_types": ["sparse"] * 4,
    "first_k_dense_replace": 0,  # the same, as vLLM reads it
    "num_experts": 2,  # and both for each token: nothing is routed otherwise in 16 bits
    "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 128,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "kimi_linear": LATENT,
    "qwen3_next": {**TEXT, **EXPERTS},
    "qwen3_5": TEXT,
    "qwen3_5_moe": {**TEXT, **EXPERTS},
    "qwen3_5_text": TEXT,
}
KNOWN = {
    "vllm": ["qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear"],
    "sglang": ["qwen3_next", "qwen3_5_text"],
}

SHOWN = (  # what was installed and the family, by the heading of its column
    {
        "vLLM alone: Qwen3.5": ("vllm", "qwen3_5"),
        "with Statecut: Qwen3.5": ("vllm and statecut", "qwen3_5"),
        "with Statecut: Qwen3-Next": ("vllm and statecut", "qwen3_next"),
        "SGLang: Qwen3.5": ("sglang", "qwen3_5_text"),
        "SGLang: Qwen3-Next": ("sglang", "qwen3_next"),
    },
    {
        "vLLM alone: Kimi Linear": ("vllm", "kimi_linear"),
        "with Statecut: Kimi Linear": ("vllm and statecut", "kimi_linear"),
    },
)


def make_whole(family, folder):
    """The unpruned model, in bfloat16 so that engine and reference have the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, **FAMILIES[family]}
    auto, config = AutoModelForCausalLM, FAMILIES[family] if family == "kimi_linear" else text
    if family in ("qwen3_5", "qwen3_5_moe"):  # vLLM knows them with their vision tower alone
        auto, config = AutoModelForImageTextToText, {"text_config": text, "vision_config": VISION}
    torch.manual_seed(4)
    model = auto.from_config(AutoConfig.for_model(family, **config))
    model.to(torch.bfloat16).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved.get("text_config", saved)["full_attention_interval"] = 4  # SGLang reads no layer_types
    saved |= {
        key: config[key] for key in ("first_k_dense_replace", "mla_use_nope") if key in config
    }
    (folder / "config.json").write_text(json.dumps(saved))


def make_cut(whole, folder, shape):
    import statecut

    keys, values = map(int, shape.split("x"))
    if shape == "128x128":
        folder.symlink_to(whole)
    else:
        statecut.prune(whole, folder, keys=keys, values=values, method="l1", refit=False)


def reference(folder, sequences):
    """Log-probabilities of each sequence's tokens from the second on, and how much they change, on
    average, when the delta layers put out nothing."""
    import statecut
    from statecut.models.capture import mixers

    model = statecut.load(folder, dtype=torch.float32)
    right = [log_probabilities(model, ids) for ids in sequences]
    kind, _, modules = mixers(model)
    with torch.no_grad():
        for module in modules:
            module.get_parameter(kind.norm).zero_()
    without = [log_probabilities(model, ids) for ids in sequences]
    return right, mean(errors_of(right, without))


def log_probabilities(model, ids):
    ids = torch.tensor([ids])
    with torch.no_grad():
        predicted = model(ids).logits[0, :-1].log_softmax(-1)
    return predicted.gather(1, ids[0, 1:, None])[:, 0].tolist()


def errors_of(ours, theirs):
    rows = zip(ours, theirs, strict=True)
    return [abs(a - b) for row in rows for a, b in zip(*row, strict=True)]


def in_vllm(folder, prompts, arguments):
    import vllm

    engine = vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.02,
        mamba_ssm_cache_dtype="float32",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        language_model_only=True,
        **arguments,
    )
    options = {"temperature": 0, "max_tokens": GENERATED, "ignore_eos": True, "detokenize": False}
    given = [{"prompt_token_ids": ids} for ids in prompts]
    first = engine.generate(given, vllm.SamplingParams(prompt_logprobs=0, logprobs=0, **options))
    again = engine.generate(given, vllm.SamplingParams(logprobs=0, **options))

    def chosen(ids, places):
        return [place[token].logprob for token, place in zip(ids, places, strict=True)]

    def generated(outputs):
        answers = [output.outputs[0] for output in outputs]
        return [chosen(answer.token_ids, answer.logprobs) for answer in answers]

    def tokens(outputs):
        return [[*output.outputs[0].token_ids] for output in outputs]

    return {
        "version": vllm.__version__,
        "prefill": [chosen(o.prompt_token_ids[1:], o.prompt_logprobs[1:]) for o in first],
        "tokens": tokens(first),
        "decoding": generated(first),
        "tokens_again": tokens(again),
        "cached": generated(again),
        "from_cache": [output.num_cached_tokens for output in again],
    }


def in_sglang(folder, prompts, arguments):
    import sglang

    engine = sglang.Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_running_requests=4,
        chunked_prefill_size=CHUNK,
        max_total_tokens=8192,
        max_mamba_cache_size=64,
        mamba_radix_cache_strategy="extra_buffer",  # its own choice, but for text-only Qwen3.5
        mamba_ssm_dtype="float32",
        cuda_graph_max_bs_decode=4,
        **arguments,
    )
    options = {"temperature": 0, "max_new_tokens": GENERATED, "ignore_eos": True}
    ask = partial(engine.generate, input_ids=prompts, sampling_params=options, return_logprob=True)
    # With the log-probabilities of a prompt nothing comes from the cache.
    first, again = ask(logprob_start_len=0), ask(logprob_start_len=[len(p) - 1 for p in prompts])

    def entries(outputs, which, place):
        return [[entry[place] for entry in output["meta_info"][which]] for output in outputs]

    return {
        "version": sglang.__version__,
        "prefill": [row[1:] for row in entries(first, "input_token_logprobs", 0)],
        "tokens": entries(first, "output_token_logprobs", 1),
        "decoding": entries(first, "output_token_logprobs", 0),
        "tokens_again": entries(again, "output_token_logprobs", 1),
        "cached": entries(again, "output_token_logprobs", 0),
        "from_cache": [output["meta_info"]["cached_tokens"] for output in again],
    }


ENGINES = {"vllm": in_vllm, "sglang": in_sglang}


def compare(folder, prompts, answer):
    """Errors by what was computed, and the effect of the delta layers."""
    errors = {}
    for part, tokens in (("decoding", "tokens"), ("cached", "tokens_again")):
        whole = [[*a, *b] for a, b in zip(prompts, answer[tokens], strict=True)]
        right, effect = reference(folder, whole)
        if part == "decoding":
            prefill = [row[: len(ids) - 1] for row, ids in zip(right, prompts, strict=True)]
            errors["prefill"] = errors_of(prefill, answer["prefill"])
        errors[part] = errors_of([row[-GENERATED:] for row in right], answer[part])
    return errors, effect


def serve(engine, root, prompts, arguments, environment, cell):
    """One row of the table."""
    family, shape = cell
    folder = root / f"{family}-{shape}"
    plugin = engine == "vllm" and environment.get("VLLM_PLUGINS") != ""
    row = {"engine": engine, "installed": f"{engine} and statecut" if plugin else engine}
    row |= {"family": family, "shape": shape}
    command = [sys.executable, __file__, engine, "--serve", str(folder), "--arguments", arguments]
    with open(f"{folder}.log", "w") as log:
        options = {"env": environment, "input": json.dumps(prompts), "text": True}
        done = subprocess.run(command, stdout=log, stderr=log, **options)
    lines = Path(f"{folder}.log").read_text(errors="replace").splitlines()
    said = [line.split("] ")[-1] for line in lines if "statecut" in line and "INFO" in line]
    row["plugin"] = sorted({line for line in said if line.startswith("statecut ")})
    if done.returncode:
        errors = [place for place, line in enumerate(lines) if "Error" in line]
        after = lines[errors[-1] if errors else -1 :]
        reason = [line for line in after[1:20] if line[:1].islower()]  # Triton's, below its code
        message = " ".join([*after[:1], *reason[:1]])[-300:]
        return {**row, "outcome": "does not start", "message": message}
    answer = json.loads((folder / "answer.json").read_text())
    errors, effect = compare(folder, prompts, answer)
    medians, means = ({key: f(e) for key, e in errors.items()} for f in (median, mean))
    outcome = "right" if max(medians.values()) <= RIGHT * effect else "WRONG"
    kept = {key: answer[key] for key in ("version", "from_cache")}
    return {**row, "outcome": outcome, "medians": medians, "means": means, "effect": effect, **kept}


def tables(rows):
    """Median errors of log-probabilities, prompt / generated, by shape; or what happened."""
    cells = {}
    for row in rows:
        outcome = "" if row["outcome"] == "right" else f"{row['outcome']} "
        if "medians" in row:
            outcome += f"{row['medians']['prefill']:.3f} / {row['medians']['decoding']:.3f}"
        cells[row["shape"], row["installed"], row["family"]] = outcome.strip()
    shapes = sorted({shape for shape, *_ in cells}, key=lambda s: [-int(n) for n in s.split("x")])
    for columns in SHOWN:
        table = {s: [cells.get((s, *c), "not run") for c in columns.values()] for s in shapes}
        yield markdown(
            " | ".join(["d_k x d_v", *columns]),
            ((shape, *row) for shape, row in table.items() if {*row} != {"not run"}),
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engine", nargs="?", choices=ENGINES)
    parser.add_argument("--table", type=existing, metavar="FILE", help="print what it holds")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, help="(default: all it knows)")
    parser.add_argument(
        "--shapes", nargs="*", default=SHAPES, help=f"(default: {' '.join(SHAPES)})"
    )
    parser.add_argument("--arguments", default="{}", help="of the engine, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="engines side by side (default: 1)")
    parser.add_argument("--out", type=Path, help="write the rows there, as JSON")
    parser.add_argument("--logs", type=Path, help="models and logs stay there (default: nowhere)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        rows = json.loads(options.table.read_text())
        print(*tables(rows), sep="\n\n")
        return
    if not options.engine:
        parser.error(f"name an engine: {', '.join(ENGINES)}")
    if options.serve:
        arguments = json.loads(options.arguments)
        answer = ENGINES[options.engine](options.serve, json.load(sys.stdin), arguments)
        (options.serve / "answer.json").write_text(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)  # engines end slowly
    environment = {**os.environ}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the reference is computed on a CPU
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1024, (n,), generator=generator).tolist() for n in PROMPTS]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        root = options.logs or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        cells = [
            (family, shape)
            for family, shape in product(options.families or KNOWN[options.engine], options.shapes)
            if family != "kimi_linear" or len({*shape.split("x")}) == 1
        ]
        for family, shape in cells:
            if not (root / family).exists():
                make_whole(family, root / family)
            make_cut(root / family, root / f"{family}-{shape}", shape)
        rows = []
        work = partial(serve, options.engine, root, prompts, options.arguments, environment)
        for row in pool.map(work, cells):
            print(row, flush=True)
            rows.append(row)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
