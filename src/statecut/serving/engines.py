"""Which widths of keys and values serving engines take: `statecut prune --for`, `statecut inspect`.

What was read was read for d_v = 128, of llama.cpp for d_k = d_v. The table of docs/engines.md is
what `python -m statecut.serving.engines` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from statecut.errors import InputError, nearest
from statecut.models.shapes import MixerShape

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
READ = "read in its source, not run"
VALUE_WIDTH = 128  # what sources were read for

NO_KEYS_ALONE = "no cut of keys alone (--state, --keys and --values cut values, too)"


@dataclass(frozen=True)
class Engine:
    name: str
    label: str
    source: str  # where its widths stand
    evidence: str = READ  # how they are known
    date: str = "August 2026"
    models: tuple[str, ...] = QWEN  # the model types this holds for; all that Statecut has if empty
    multiple: int = 1  # it takes multiples of this
    largest: int | None = None
    only: tuple[int, ...] = ()  # it takes no others, if there are any here
    square: bool = False  # it takes d_k = d_v alone
    wrong: str = ""  # where it computes any other width wrong, without an error
    setting: str = ""  # that it needs,
    setting_unless: int | None = None  # except at this d_k, with the d_v that it was read for
    note: str = ""

    def has(self, model_type: str) -> bool:
        return not self.models or model_type in self.models

    def takes(self, width: int, value_width: int) -> bool:
        return (
            width % self.multiple == 0
            and (self.largest is None or width <= self.largest)
            and (not self.only or width in self.only)
            and (not self.square or width == value_width)
        )

    def knows(self, value_width: int) -> bool:
        """Whether its widths are known for models of that d_v."""
        return not self.models or self.square or value_width == VALUE_WIDTH

    def serves(self, model_type: str, shape: MixerShape) -> bool:
        """Whether a model of that shape runs in it, or is expected to."""
        known = self.has(model_type) and self.knows(shape.value_width)
        return known and self.takes(shape.width, shape.value_width)

    def check_model(self, model_type: str) -> None:
        if not self.has(model_type):
            raise InputError(
                f"engine {self.name}: nothing is known of {model_type} models in {self.label}, "
                f"only of {', '.join(self.models)}; leave it out"
            )

    def widths(self) -> str:
        """Those it takes, in words."""
        limits = [
            "only d_k = d_v" if self.square else "",
            f"multiples of {self.multiple}" if self.multiple > 1 else "",
            f"d_k up to {self.largest}" if self.largest else "",
            f"of {', '.join(map(str, self.only))}" if self.only else "",
        ]
        return " ".join(filter(None, limits)) or "any d_k"

    def start(self) -> str:
        """The setting that it needs, for all widths."""
        widths = f"d_k is {self.setting_unless} and d_v {VALUE_WIDTH}"
        unless = f" unless {widths}" if self.setting_unless else ""
        return f"`{self.setting}`{unless}" if self.setting else ""

    def known(self, value_width: int) -> str:
        """How its widths are known, and that it is for another d_v if it is."""
        other = f", for d_v {VALUE_WIDTH}; nothing is known of d_v {value_width}"
        return f"{self.evidence}{'' if self.knows(value_width) else other} ({self.date})"

    def advice(self, shape: MixerShape) -> str:
        """What to know before a model of that d_k and d_v is served."""
        without = (shape.width, shape.value_width) == (self.setting_unless, VALUE_WIDTH)
        start = f"start it with `{self.setting}`; " if self.setting and not without else ""
        return f"{self.label}: {start}{self.known(shape.value_width)}"

    def about(self, value_width: int) -> str:
        """What is known of it, for models of that d_v."""
        wrong = f"any other is computed wrong {self.wrong}, without an error" if self.wrong else ""
        start = f"start it with {self.start()}" if self.setting else ""
        remarks = (f"takes {self.widths()}", wrong, start, self.known(value_width), self.note)
        return f"{self.label}: {'; '.join(filter(None, remarks))}"

    def cuts(self, shape: MixerShape, multiple: int = 1) -> list[int]:
        """The d_k below the model's own that it takes, ascending."""
        widths = range(multiple, shape.width, multiple)
        return [width for width in widths if self.takes(width, shape.value_width)]

    def way_out(self, shape: MixerShape, multiple: int = 1) -> str:
        """How to cut a model of that shape where no width can be rounded up."""
        if not (cuts := self.cuts(shape, multiple)):
            return "give a smaller --round-to" if multiple > 1 else NO_KEYS_ALONE
        # Down to three places, so that the width is not one less.
        ratio = (shape.width - cuts[-1]) * 1000 // shape.width / 1000
        return f"--ratio {ratio:g} keeps {cuts[-1]}"

    def round_up(self, width: int, shape: MixerShape, multiple: int = 1) -> int:
        """The narrowest d_k from `width` on that it takes, below the model's own, and a multiple of
        what the user gives."""
        if wide_enough := [w for w in self.cuts(shape, multiple) if w >= width]:
            return wide_enough[0]
        multiples = f" that is a multiple of {multiple}" if multiple > 1 else ""
        raise InputError(
            f"--for {self.name}: {self.label} takes no d_k from {width} to {shape.width - 1}"
            f"{multiples} (the model has d_k {shape.width}, d_v {shape.value_width}); it takes "
            f"{self.widths()}: {self.way_out(shape, multiple)}"
        )


_TESTED = "is run in Statecut's tests"
_FOR_QWEN = (
    Engine(
        "vllm",
        label="vLLM",
        source="third_party/flash_linear_attention/ops/chunk_delta_h.py, fused_recurrent.py; "
        "qwen_gdn_linear_attn.py",
        largest=256,
        setting="--gdn-prefill-backend triton",
        setting_unless=128,
        note="on Hopper its default prefill kernel raises unless d_k is 128; decoding computes in "
        "tiles of the next power of two",
    ),
    Engine(
        "sglang",
        label="SGLang",
        source="srt/layers/attention/linear/gdn_backend.py",
        largest=256,
        note="with its default kernels, Triton's; FlashInfer's take 128 alone",
    ),
    Engine(
        "tensorrt-llm",
        label="TensorRT-LLM",
        source="_torch/modules/mamba/gdn_mixer.py, _torch/modules/fla/chunk_delta_h.py",
        largest=256,
        setting="TLLM_USE_FLASHINFER_GDN_PREFILL=0",
        setting_unless=128,
        note="the setting is an environment variable; on Hopper its default prefill kernel takes "
        "128 alone",
    ),
    Engine(
        "mlx",
        label="mlx-lm",
        evidence=f"its CPU path {_TESTED}, its kernel for a Mac's GPU was {READ}",
        source="mlx_lm/models/gated_delta.py",
        multiple=32,
        wrong="on a Mac's GPU",
        note="its CPU path takes any width",
    ),
    Engine(
        "llama.cpp",
        label="llama.cpp",
        evidence=f"its CPU path {_TESTED} (`make test-llama`), its CUDA kernel was {READ}",
        date="November 2026",
        source="llama-cpp-python 0.3.36, which holds llama.cpp 0c1e570: qwen3next.cpp, qwen35.cpp, "
        "delta-net-base.cpp, ggml-cpu/ops.cpp, ggml-cuda/gated_delta_net.cu",
        square=True,
        only=(16, 32, 64, 128),
        note="on a CPU any square; CUDA ends the program at others, and a model that is not square "
        "is not loaded",
    ),
)
_TRANSFORMERS = Engine(
    "transformers",
    label="transformers",
    evidence="run in Statecut's tests",
    date="November 2026",
    source="transformers 5.17, flash-linear-attention 0.6.0",
    models=(),
    note="multiples of 16 run fastest on a GPU",
)
ENGINES = {engine.name: engine for engine in (_TRANSFORMERS, *_FOR_QWEN)}


def engine_named(name: str) -> Engine:
    if name not in ENGINES:
        raise InputError(f"engine {name}: there is none of this name{nearest(name, ENGINES)}")
    return ENGINES[name]


def computed_wrong(
    model_type: str, cut: MixerShape, shape: MixerShape, *, by_ratio: bool = True
) -> Iterator[str]:
    """A line for each engine that takes a model of that shape, and computes it wrong without an
    error once it is cut like this; with the way out, which depends on how the widths came about."""
    for engine in ENGINES.values():
        right = engine.takes(cut.width, cut.value_width)
        if not engine.wrong or not engine.has(model_type) or right:
            continue
        full = replace(cut, width=shape.width)
        wider = [width for width in engine.cuts(full) if width >= cut.width]
        way_out = f"give --for {engine.name}"
        if by_ratio and wider:
            way_out = f"`statecut prune --for {engine.name}` rounds up to {wider[0]}"
        elif by_ratio:
            way_out = engine.way_out(full)
        yield (
            f"WARNING: {engine.label} computes d_k {cut.width} wrong {engine.wrong}, without an "
            f"error: it takes {engine.widths()}, {way_out}"
        )


def table() -> str:
    """All of it, in Markdown."""
    rows = ["| `--for` | d_k | needs | known | where, when |", "|---|---|---|---|---|"]
    for e in ENGINES.values():
        wrong = f"any other is computed **wrong {e.wrong}, without an error**" if e.wrong else ""
        widths = "; ".join(filter(None, (e.widths(), wrong, e.note)))
        rows.append(
            f"| `{e.name}` | {widths} | {e.start()} | {e.evidence} | {e.source}; {e.date} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
