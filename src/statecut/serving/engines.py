"""Which widths of keys and values serving engines take: `statecut prune --for`, `statecut inspect`.

The table of docs/reference/engines.md is what `python -m statecut.serving.engines` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from statecut.errors import InputError, nearest
from statecut.models.shapes import WIDEST, MixerShape

READ = "read in its source, not run"
TESTS = "run in Statecut's tests"
H200 = "run on an H200 (`benchmarks/serving.py`)"

Widths = tuple[int, int]  # d_k and d_v
# The model types that an engine knows, and what was run of each; None: any widths that it takes.
Models = Mapping[str, tuple[Widths, ...] | None]


@dataclass(frozen=True)
class Engine:
    name: str
    label: str
    version: str  # that was run or read, and when
    takes: Callable[[int, int], bool]  # whether it computes d_k and d_v
    widths: str  # those, in words
    evidence: str = READ
    models: Models = field(default_factory=dict)  # empty: all that Statecut has,
    lacks: tuple[str, ...] = ()  # but for these
    command: str = ""  # that starts it with the model in OUT
    setting: str = ""  # that it needs,
    unless: Widths | None = None  # except at these
    note: str = ""
    instead: str = ""  # what else helps where it takes no width

    def serves(self, model_type: str, shape: MixerShape) -> bool:
        """Whether a model of that shape runs in it, or is expected to."""
        return self.knows(model_type) and self.takes(shape.width, shape.value_width)

    def knows(self, model_type: str) -> bool:
        return model_type in self.models if self.models else model_type not in self.lacks

    def ran_with(self, model_type: str, shape: MixerShape) -> bool:
        ran = self.models.get(model_type)
        return ran is None or (shape.width, shape.value_width) in ran

    def check_model(self, model_type: str) -> None:
        if not self.knows(model_type):
            known = ", ".join(e.name for e in ENGINES.values() if e.knows(model_type))
            raise InputError(
                f"engine {self.name}: no {model_type} model is known to run right in {self.label}; "
                f"{f'engines for it: {known}' if known else 'leave it out'}"
            )

    def start(self) -> str:
        """The setting that it needs, for all widths."""
        unless = f" unless d_k is {self.unless[0]} and d_v {self.unless[1]}" if self.unless else ""
        return f"`{self.setting}`{unless}" if self.setting else ""

    def advice(self, model_type: str, shape: MixerShape, folder: str) -> str:
        """How a model of that d_k and d_v is served, and how that is known."""
        needed = self.setting and (shape.width, shape.value_width) != self.unless
        words = [self.command.replace("OUT", folder), self.setting if needed else ""]
        start = " ".join(filter(None, words))
        start = f"start it with `{start}`; " if start else ""
        evidence = self.evidence if self.ran_with(model_type, shape) else "expected to run, not run"
        return f"{self.label}: {start}{evidence} ({self.version})"

    def about(self) -> str:
        """What is known of it."""
        start = f"start it with {self.start()}" if self.setting else ""
        remarks = (f"takes {self.widths}", start, f"{self.evidence} ({self.version})", self.note)
        return f"{self.label}: {'; '.join(filter(None, remarks))}"

    def cuts(self, shape: MixerShape, multiple: int = 1) -> list[int]:
        """The d_k below the model's own that it takes, ascending."""
        widths = range(multiple, shape.width, multiple)
        return [width for width in widths if self.takes(width, shape.value_width)]

    def way_out(self, shape: MixerShape, multiple: int = 1) -> str:
        """What to type where no d_k can be rounded up."""
        ways = ["--state, or --keys and --values, to cut values too", self.instead]
        if cuts := self.cuts(shape, multiple):
            # Down to three places, so that the width is not one less.
            ratio = (shape.width - cuts[-1]) * 1000 // shape.width / 1000
            ways.insert(0, f"--ratio {ratio:g} keeps {cuts[-1]}")
        elif multiple > 1:
            ways.insert(0, "a smaller --round-to")
        return "; or ".join(filter(None, ways))

    def round_up(self, width: int, shape: MixerShape, multiple: int = 1) -> int:
        """The narrowest d_k from `width` on that it takes, below the model's own, and a multiple of
        what the user gives."""
        if wide_enough := [w for w in self.cuts(shape, multiple) if w >= width]:
            return wide_enough[0]
        multiples = f" that is a multiple of {multiple}" if multiple > 1 else ""
        raise InputError(
            f"--for {self.name}: {self.label} takes no d_k from {width} to {shape.width - 1}"
            f"{multiples} (the model has d_k {shape.width}, d_v {shape.value_width}); it takes "
            f"{self.widths}: {self.way_out(shape, multiple)}"
        )


def _rounded(width: int) -> int:
    """Up to a power of two, as Triton's tiles are."""
    return 1 << (width - 1).bit_length()


SQUARES = (16, 32, 64, 128)  # of llama.cpp's CUDA kernel
IN_VLLM = ((128, 128), (96, 128), (64, 64))
IN_PLUGIN = (
    *((width, 128) for width in (96, 64, 32, 20)),
    *((width, 64) for width in (128, 64, 32)),
)
IN_SGLANG = tuple((width, values) for values in (128, 64) for width in (128, 64, 32))
# Qwen3.5 without its vision tower, as transformers saves a language model by itself.
TEXT_ONLY: Models = {"qwen3_5_text": (), "qwen3_5_moe_text": ()}
HYBRIDS: Models = {"qwen3_next": (), "qwen3_5": (), "qwen3_5_moe": ()}
ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "transformers",
            label="transformers",
            version="transformers 5.23 and 5.17, flash-linear-attention 0.6.0; November 2026",
            takes=lambda width, values: True,
            widths="any d_k and d_v",
            evidence=TESTS,
            lacks=("kimi_k3",),
            note="multiples of 16 run fastest on a GPU",
        ),
        Engine(
            "vllm",
            label="vLLM",
            version="vLLM 0.26.0; November 2026",
            takes=lambda width, values: width <= WIDEST and _rounded(width) == _rounded(values),
            widths="d_k and d_v that round up to the same power of two",
            evidence=H200,
            models={**HYBRIDS, "qwen3_next": IN_VLLM, "qwen3_5": IN_VLLM},
            command="vllm serve OUT",
            setting="--gdn-prefill-backend triton",
            unless=(128, 128),
            note="at others it does not start: a Triton kernel does not compile; the setting is "
            "for Hopper GPUs (read), where its own choice takes 128 alone",
            instead="--for vllm+statecut, with Statecut installed beside vLLM",
        ),
        Engine(
            "vllm+statecut",
            label="vLLM with Statecut installed beside it",
            version="vLLM 0.26.0; November 2026",
            takes=lambda width, values: width <= WIDEST,
            widths="d_k up to 256, any d_v",
            evidence=H200,
            models={
                "qwen3_next": IN_PLUGIN,
                "qwen3_5": IN_PLUGIN,
                "qwen3_5_moe": ((64, 128), (64, 64)),
                "kimi_linear": ((128, 128), (64, 64), (32, 32)),
            },
            command="vllm serve OUT",
            note="vLLM finds Statecut's plugin by itself and logs one line where it takes over",
        ),
        Engine(
            "sglang",
            label="SGLang",
            version="SGLang 0.5.17; November 2026",
            takes=lambda width, values: (
                width <= WIDEST and (_rounded(width), _rounded(values)) == (width, values)
            ),
            widths="d_k and d_v that are powers of two",
            evidence=H200,
            models={**HYBRIDS, **TEXT_ONLY, "qwen3_next": IN_SGLANG, "qwen3_5_text": IN_SGLANG},
            command="python -m sglang.launch_server --model-path OUT",
            note="at others it does not start: a Triton kernel does not compile",
        ),
        Engine(
            "tensorrt-llm",
            label="TensorRT-LLM",
            version="August 2026",
            takes=lambda width, values: width <= WIDEST and values == 128,
            widths="d_k up to 256 with d_v 128",
            models={**HYBRIDS, **TEXT_ONLY},
            setting="TLLM_USE_FLASHINFER_GDN_PREFILL=0",
            unless=(128, 128),
            note="the setting is an environment variable; on Hopper its default prefill kernel "
            "takes 128 alone",
        ),
        Engine(
            "mlx",
            label="mlx-lm",
            version="mlx-lm 0.32.2; November 2026",
            takes=lambda width, values: True,
            widths="any d_k and d_v",
            evidence=f"its CPU path is {TESTS}, its kernel for a Mac's GPU was {READ}",
            models=dict.fromkeys(HYBRIDS),
            command='mlx_lm.generate --model OUT --prompt "..."',
            note="on a Mac's GPU multiples of 32 have a kernel, others a slower path; before "
            "0.32 the others were computed wrong there",
        ),
        Engine(
            "llama.cpp",
            label="llama.cpp",
            version="llama-cpp-python 0.3.36, with llama.cpp 0c1e570; November 2026",
            takes=lambda width, values: width == values and width in SQUARES,
            widths="only d_k = d_v of 16, 32, 64, 128",
            evidence=f"its CPU path is {TESTS} (`make test-llama`), its CUDA kernel was {READ}",
            models=dict.fromkeys((*HYBRIDS, *TEXT_ONLY)),
            command="convert_hf_to_gguf.py OUT --outfile OUT.gguf; llama-server -m OUT.gguf",
            note="on a CPU any square; CUDA ends the program at others, and a model that is not "
            "square is not loaded",
        ),
    )
}


def engine_named(name: str) -> Engine:
    if name not in ENGINES:
        raise InputError(f"engine {name}: there is none of this name{nearest(name, ENGINES)}")
    return ENGINES[name]


def table() -> str:
    """All of it, in Markdown."""
    columns = ("`--for`", "models", "widths", "setting", "how it is known", "version")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for e in ENGINES.values():
        models = ", ".join(f"`{name}`" for name in e.models) or "all"
        models += "".join(f" but `{name}`" for name in e.lacks)
        by_widths: dict[tuple[Widths, ...], list[str]] = {}
        for name, ran in e.models.items():
            if ran:
                by_widths.setdefault(ran, []).append(f"`{name}`")
        evidence = e.evidence
        for ran, names in by_widths.items():
            words = ", ".join(f"{width} x {values}" for width, values in ran)
            evidence += f"; {', '.join(names)}: {words}"
        widths = f"{e.widths}; {e.note}" if e.note else e.widths
        cells = (f"`{e.name}`", models, widths, e.start(), evidence, e.version)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
