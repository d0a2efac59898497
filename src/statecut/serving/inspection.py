"""What is in a model, and what pruning it would save: `statecut inspect`. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from statecut.arguments import width as width_of
from statecut.models.checkpoint import Checkpoint
from statecut.serving.engines import ENGINES, READ

TOKENS = (4_096, 32_768, 131_072)
RATIOS = (0, 0.25, 0.5, 0.75, 0.875)  # the model as it is comes first


@dataclass(frozen=True)
class Context:
    """The cache of a hybrid after so many tokens."""

    tokens: int
    softmax_bytes: int
    state_share: float  # of all cache


@dataclass(frozen=True)
class Cut:
    """The model with that share of its key channels removed."""

    ratio: float
    width: int
    state_bytes: int
    saved_bytes: int
    saved_shares: tuple[float, ...]  # of all cache, by context
    engines: tuple[str, ...]  # that run this width with the model's d_v, or are expected to

    def line(self) -> str:
        shares = "".join(f"  {percent(share):>8}" for share in self.saved_shares)
        read = [name for name in self.engines if ENGINES[name].evidence == READ]
        engines = ", ".join(name for name in self.engines if name not in read)
        return (
            f"{self.ratio:7g}  {self.width:3}  {size(self.state_bytes):>10}  "
            f"{size(self.saved_bytes):>10}{shares}  {engines}"
            + (f"; expected: {', '.join(read)}" if read else "")
        )


@dataclass(frozen=True)
class Widths:
    width: int
    value_width: int

    def __str__(self) -> str:
        return f"{self.width} x {self.value_width}"


@dataclass(frozen=True)
class Budget:
    """Cuts of keys and values that leave at most that share of the recurrent state."""

    share: float
    splits: tuple[Widths, ...]
    by_engine: dict[str, tuple[Widths, ...]]  # where one takes others

    def line(self) -> str:
        groups = {"": self.splits} | {f"for {n}: ": s for n, s in self.by_engine.items()}
        words = [who + (", ".join(map(str, s)) or "none") for who, s in groups.items()]
        return f"{self.share:7g}  {'; '.join(words)}"


@dataclass(frozen=True)
class Inspection:
    model_type: str
    parameters: int
    delta_layers: int
    softmax_layers: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    recurrent_bytes: int
    filter_bytes: int
    contexts: tuple[Context, ...]  # none if the state is all there is
    cuts: tuple[Cut, ...]
    budgets: tuple[Budget, ...]

    @property
    def state_bytes(self) -> int:
        return self.recurrent_bytes + self.filter_bytes

    def lines(self) -> list[str]:
        layers = f"{self.delta_layers} with a delta rule"
        if self.softmax_layers:
            layers += f", {self.softmax_layers} with softmax attention"
        state = f"{size(self.recurrent_bytes)} recurrent state in float32"
        if self.filter_bytes:
            state += f", {size(self.filter_bytes)} of convolutions in 16 bits"
        contexts = ["other cache          none: the state does not grow with the sequence"]
        saved, tokens = [], ""
        if self.contexts:
            contexts = ["", " tokens  softmax cache in 16 bits  state's share of all cache"]
            for c in self.contexts:
                share = percent(c.state_share)
                contexts.append(f"{c.tokens:7,}  {size(c.softmax_bytes):>24}  {share:>26}")
                tokens += f"  {c.tokens:8,}"
            saved = [" " * 36 + "  saved of all cache, at tokens"]
        return [
            f"model                {self.model_type}, {self.parameters:,} parameters in its files",
            f"layers               {layers}",
            f"heads                {self.key_heads} of keys, {self.value_heads} of values; "
            f"d_k {self.key_width}, d_v {self.value_width}",
            f"cache per request    {size(self.state_bytes)}: {state}",
            *contexts,
            "",
            *saved,
            f"--ratio  d_k       state       saved{tokens}  runs in",
            *(cut.line() for cut in self.cuts),
            "",
            "--state  d_k x d_v to compare",
            *(budget.line() for budget in self.budgets),
            "",
            *self._engine_lines(),
        ]

    def _engine_lines(self) -> list[str]:
        lines = []
        for engine in ENGINES.values():
            if engine.has(self.model_type):
                wrong = f"any other is computed wrong {engine.wrong}, without an error"
                remarks = [
                    f"takes {engine.widths()}",
                    *([wrong] if engine.wrong else []),
                    *([f"start it with {engine.start()}"] if engine.setting else []),
                    engine.known(self.value_width),
                ]
                lines.append(f"{engine.name:12}  {'; '.join(remarks)}")
                if engine.note:
                    lines.append(f"{'':12}  {engine.note}")
        if others := [e.name for e in ENGINES.values() if not e.has(self.model_type)]:
            lines.append(f"Nothing is known of {self.model_type} models in {', '.join(others)}.")
        return lines


def inspect(checkpoint: Checkpoint, budgets: tuple[Budget, ...]) -> Inspection:
    """From config.json and the headers of the weights' files; `budgets` are those to show."""
    shape, model_type = checkpoint.shape, checkpoint.architecture.model_type
    cache = checkpoint.architecture.cache(checkpoint.config)
    tokens = TOKENS if cache.softmax else ()
    cuts = []
    for ratio in RATIOS:
        if shape.width * (1 - ratio) < 1:
            continue
        cut = cache.resized(width_of(shape.width, ratio))
        saved = cache.state_bytes() - cut.state_bytes()
        engines = [e.name for e in ENGINES.values() if e.serves(model_type, cut.shape)]
        cuts.append(
            Cut(
                ratio,
                cut.shape.width,
                state_bytes=cut.state_bytes(),
                saved_bytes=saved,
                saved_shares=tuple(saved / cache.total_bytes(n) for n in tokens),
                engines=tuple(engines),
            )
        )
    return Inspection(
        model_type,
        parameters=sum(tensor.numel() for _, tensor in checkpoint.headers()),
        delta_layers=len(shape.layers),
        softmax_layers=sum(kind.layers for kind in cache.softmax),
        key_heads=shape.heads,
        value_heads=shape.value_heads,
        key_width=shape.width,
        value_width=shape.value_width,
        recurrent_bytes=shape.state_bytes(),
        filter_bytes=cache.filter_bytes(),
        contexts=tuple(
            Context(n, cache.softmax_bytes(n), cache.state_bytes() / cache.total_bytes(n))
            for n in tokens
        ),
        cuts=tuple(cuts),
        budgets=budgets,
    )


def size(count: int) -> str:
    """Bytes, for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
