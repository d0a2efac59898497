"""What is in a model, and what pruning it would save: `statecut inspect`. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from statecut.arguments import width as width_of
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.budget import Split, splits_within
from statecut.pruning.slicing import check_sliceable
from statecut.serving.engines import ENGINES, Engine

TOKENS = (4_096, 32_768, 131_072)
RATIOS = (0, 0.25, 0.5, 0.75, 0.875)  # the model as it is comes first
SHARES = (0.5, 0.25, 0.125)


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
    engines: tuple[str, ...]  # that are known to compute this width right, with the model's d_v


@dataclass(frozen=True)
class Budget:
    """Cuts of keys and values that leave at most that share of the recurrent state."""

    share: float
    splits: tuple[Split, ...]
    by_engine: dict[str, tuple[Split, ...]]  # where one takes others

    def line(self) -> str:
        def words(splits: tuple[Split, ...]) -> str:
            return ", ".join(map(str, splits)) or "none"

        engines = [f"for {name}: {words(splits)}" for name, splits in self.by_engine.items()]
        return f"{self.share:7g}  {'; '.join([words(self.splits), *engines])}"


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
        state = f"{size(self.recurrent_bytes)} recurrent in float32"
        if self.filter_bytes:
            state += f", {size(self.filter_bytes)} of convolutions in 16 bits"
        return [
            f"model                {self.model_type}, {self.parameters:,} parameters in its files",
            f"layers               {layers}",
            f"heads                {self.key_heads} of keys, {self.value_heads} of values; "
            f"d_k {self.key_width}, d_v {self.value_width}",
            f"state of a sequence  {size(self.state_bytes)}: {state}",
            *self._context_lines(),
            "",
            *self._cut_lines(),
            "",
            "--state  d_k x d_v to compare",
            *(budget.line() for budget in self.budgets),
            "",
            *self._engine_lines(),
        ]

    def _context_lines(self) -> list[str]:
        if not self.contexts:
            return ["other cache          none: the state does not grow with the sequence"]
        return [
            "",
            " tokens  softmax cache in 16 bits  state's share of all cache",
            *(
                f"{c.tokens:7,}  {size(c.softmax_bytes):>24}  {percent(c.state_share):>26}"
                for c in self.contexts
            ),
        ]

    def _cut_lines(self) -> list[str]:
        lines = [" " * 36 + "  saved of all cache, at tokens"] if self.contexts else []
        shares = "".join(f"  {c.tokens:8,}" for c in self.contexts)
        return [
            *lines,
            f"--ratio  d_k       state       saved{shares}  computed right by",
            *(
                f"{cut.ratio:7g}  {cut.width:3}  {size(cut.state_bytes):>10}  "
                f"{size(cut.saved_bytes):>10}"
                + "".join(f"  {percent(share):>8}" for share in cut.saved_shares)
                + f"  {', '.join(cut.engines)}"
                for cut in self.cuts
            ),
        ]

    def _engine_lines(self) -> list[str]:
        lines = []
        for engine in ENGINES.values():
            if engine.has(self.model_type):
                lines.append(f"{engine.name:12}  {'; '.join(self._remarks(engine))}")
                if engine.note:
                    lines.append(f"{'':12}  {engine.note}")
        if others := [e.name for e in ENGINES.values() if not e.has(self.model_type)]:
            lines.append(f"Nothing is known of {self.model_type} models in {', '.join(others)}.")
        return lines

    def _remarks(self, engine: Engine) -> list[str]:
        remarks = [f"takes {engine.widths()}"]
        if engine.wrong:
            remarks.append(f"any other is computed wrong {engine.wrong}, without an error")
        if engine.setting:
            remarks.append(engine.start())
        return [*remarks, engine.known(self.value_width)]


def inspect(folder: Path | str) -> Inspection:
    """From config.json and the headers of the weights' files."""
    checkpoint = Checkpoint(folder)
    headers = dict(checkpoint.headers())
    check_sliceable(checkpoint)
    shape, model_type = checkpoint.shape, checkpoint.architecture.model_type
    cache = checkpoint.architecture.cache(checkpoint.config)
    tokens = TOKENS if cache.softmax else ()
    cuts = []
    for ratio in RATIOS:
        if shape.width * (1 - ratio) < 1:
            continue
        cut = cache.resized(width_of(shape.width, ratio))
        saved = cache.state_bytes() - cut.state_bytes()
        takers = [
            engine.name
            for engine in ENGINES.values()
            if engine.has(model_type)
            and engine.knows(shape.value_width)
            and engine.takes(cut.shape.width, shape.value_width)
        ]
        cuts.append(
            Cut(
                ratio,
                cut.shape.width,
                state_bytes=cut.state_bytes(),
                saved_bytes=saved,
                saved_shares=tuple(saved / cache.total_bytes(n) for n in tokens),
                engines=tuple(takers),
            )
        )
    return Inspection(
        model_type,
        parameters=sum(tensor.numel() for tensor in headers.values()),
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
        budgets=tuple(budget(checkpoint, share) for share in SHARES),
    )


def budget(checkpoint: Checkpoint, share: float) -> Budget:
    def splits(engine: Engine | None) -> tuple[Split, ...]:
        return tuple(splits_within(checkpoint, share, engine)[1])

    engines = [e for e in ENGINES.values() if e.has(checkpoint.architecture.model_type)]
    by_engine = {engine.name: splits(engine) for engine in engines}
    anyone = splits(None)
    return Budget(share, anyone, {n: s for n, s in by_engine.items() if s != anyone})


def size(count: int) -> str:
    """Bytes, for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
