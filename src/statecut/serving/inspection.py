"""What a model keeps per request, and what cutting it would save: `statecut inspect`. Reads
config.json and the headers of the weights' files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from statecut.arguments import rounded_width
from statecut.errors import InputError
from statecut.models.description import Description, ModelFolder
from statecut.models.shapes import Cache
from statecut.serving.engines import ENGINES, Engine, Widths
from statecut.serving.memory import COUNTED, SHARE, Load, Room

TOKENS = (4_096, 32_768, 131_072)
RATIOS = (0.0, 0.25, 0.5, 0.75, 0.875)  # the model as it is comes first


@dataclass(frozen=True)
class Cut:
    """The model with that share of its key channels removed; of values, too, where both have one
    width."""

    ratio: float
    width: int
    state_bytes: int
    saved: tuple[float, ...]  # of all cache, after TOKENS; of the state where nothing else is kept
    runs_in: tuple[str, ...]  # engines that ran a model of these widths
    expected_in: tuple[str, ...]  # engines whose source says that they would
    room: Room | None = None  # in the engine that was given


@dataclass(frozen=True)
class Inspection:
    """Bytes are those of one request."""

    model_type: str
    parameters: int  # 0 where there is a config alone
    delta_layers: int
    softmax_layers: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    recurrent_bytes: int
    filter_bytes: int
    softmax_bytes: tuple[int, ...]  # after TOKENS; none if the state is all there is
    cuts: tuple[Cut, ...]
    splits: Mapping[float, Sequence[Widths]]  # of `--state`, by the share that stays
    square: bool = False  # keys and values have one width
    engine: str | None = None  # that `splits` are for
    load: Load | None = None  # whose `room` is counted

    def __str__(self) -> str:
        """For the screen."""
        layers = f"{self.delta_layers} with a recurrent state"
        layers += f", {self.softmax_layers} with softmax attention" if self.softmax_layers else ""
        parameters = f", {self.parameters:,} parameters" if self.parameters else ""
        state = f"{size(self.recurrent_bytes)} recurrent state (float32)"
        if self.filter_bytes:
            state += f" + {size(self.filter_bytes)} of convolutions (16 bits)"
        grown = zip(self.softmax_bytes, TOKENS, strict=False)
        after = ", ".join(f"{size(softmax)} at {tokens:,}" for softmax, tokens in grown)
        head = "".join(f"{tokens:>9,}" for tokens in TOKENS) if after else " " * 9
        saved = "saved of all cache after tokens" if after else "saved"
        lines = [
            f"model              {self.model_type}{parameters}",
            f"layers             {layers}",
            f"heads              {self.key_heads} of keys (d_k {self.key_width}), "
            f"{self.value_heads} of values (d_v {self.value_width})",
            *(["                   one width for both: a cut is a square"] if self.square else []),
            f"cache per request  {state}",
            *(
                [f"                   + softmax attention (16 bits): {after} tokens"]
                if after
                else []
            ),
            "",
            f"{'':33}{saved}",
            f"--ratio  d_k  state and filters{head}  runs in; expected to run in",
            *map(_line, self.cuts),
            "",
            f"--state  d_k x d_v that are compared{f', for {self.engine}' if self.engine else ''}",
            *(f"{share:7g}  {in_words(splits)}" for share, splits in self.splits.items()),
        ]
        if self.load and self.engine:
            lines += ["", *self._requests(self.load, ENGINES[self.engine].label)]
        if self.engine:
            lines += ["", ENGINES[self.engine].about()]
        return "\n".join(lines)

    def _requests(self, load: Load, label: str) -> Iterator[str]:
        """A line for each cut."""
        extras = ", a prefix cache" * load.prefix_cache
        extras += f", {load.drafts} draft tokens" if load.drafts else ""
        yield (
            f"requests of {load.tokens:,} tokens that fit as {label} counts{extras}: of "
            f"{load.memory / 1e9:g} GB {size(load.left_for_caches(self.parameters))} are left for "
            "caches"
        )
        yield "  d_k  state of a request   block  requests"
        for cut in self.cuts:
            if room := cut.room:
                state = f"{room.states} x {size(room.state_bytes)}"
                whole, block = self.cuts[0].room, room.block or "-"
                fits = whole and whole.requests
                more = f"  ({room.requests / fits:.2f} times)" if fits else ""
                runs = self.engine in (*cut.runs_in, *cut.expected_in)
                more += "" if runs else "  does not run there"
                yield f"{cut.width:5}{state:>20}{block:>8}{room.requests:10,}{more}"


def _line(cut: Cut) -> str:
    saved = "".join(f"{100 * share:8.1f}%" for share in cut.saved)
    engines = "; ".join(", ".join(names) for names in (cut.runs_in, cut.expected_in) if names)
    return f"{cut.ratio:7g}  {cut.width:3}{size(cut.state_bytes):>19}{saved}  {engines}"


def in_words(splits: Sequence[Widths]) -> str:
    return ", ".join(f"{width} x {value_width}" for width, value_width in splits) or "none"


def inspect(
    model: Description,
    splits: Mapping[float, Sequence[Widths]],
    engine: Engine | None = None,
    load: Load | None = None,
) -> Inspection:
    """`splits` are those to show, for an engine if one is given."""
    shape, kind = model.shape, model.architecture
    cache = kind.cache(model.config)
    count = COUNTED.get(engine.name) if engine and cache.softmax else None
    parameters = model.parameters if isinstance(model, ModelFolder) else 0
    if count and not parameters:
        raise InputError(
            f"{model.place}: what fits into a GPU depends on the weights, too: for --engine "
            f"{engine.name if engine else ''} give the model's folder"
        )
    memory = load.left_for_caches(parameters) if load else 0
    if count and load and memory <= 0:
        raise InputError(
            f"--memory {load.memory / 1e9:g}: the weights take {2 * parameters / 1e9:.1f} GB "
            f"of the {SHARE:.0%} that engines use; give more"
        )

    def cut(ratio: float) -> Cut:
        width = rounded_width(shape.width, ratio) if ratio else shape.width
        smaller = cache.resized(width, width if kind.square else None)
        room = count(smaller, memory, load) if count and load else None
        return replace(_cut(kind.model_type, cache, smaller, ratio), room=room)

    cuts = [cut(ratio) for ratio in RATIOS if int(shape.width * (1 - ratio))]
    return Inspection(
        kind.model_type,
        parameters=parameters,
        delta_layers=len(shape.layers),
        softmax_layers=sum(layers.layers for layers in cache.softmax),
        key_heads=shape.heads,
        value_heads=shape.value_heads,
        key_width=shape.width,
        value_width=shape.value_width,
        recurrent_bytes=shape.state_bytes(),
        filter_bytes=cache.filter_bytes(),
        softmax_bytes=tuple(map(cache.softmax_bytes, TOKENS)) if cache.softmax else (),
        cuts=tuple({cut.width: cut for cut in reversed(cuts)}.values())[::-1],  # rounded: each once
        splits=splits,
        square=kind.square,
        engine=engine.name if engine else None,
        load=load if count else None,
    )


def _cut(model_type: str, cache: Cache, cut: Cache, ratio: float) -> Cut:
    saved = cache.state_bytes() - cut.state_bytes()
    tokens = TOKENS if cache.softmax else (0,)
    engines = [engine for engine in ENGINES.values() if engine.serves(model_type, cut.shape)]
    return Cut(
        ratio,
        cut.shape.width,
        state_bytes=cut.state_bytes(),
        saved=tuple(saved / cache.total_bytes(n) for n in tokens),
        runs_in=tuple(e.name for e in engines if e.ran_with(model_type, cut.shape)),
        expected_in=tuple(e.name for e in engines if not e.ran_with(model_type, cut.shape)),
    )


def size(count: float) -> str:
    """Of bytes."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} {units[0]}" if units[0] == "bytes" else f"{count:.1f} {units[0]}"
