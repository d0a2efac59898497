"""The options of `statecut prune`, and what can be known without torch: what is wrong with them,
and what is to be done."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from statecut.arguments import (
    DEVICE,
    STEPS,
    TEXT,
    Eps,
    Target,
    check_counts,
    check_run,
    command_line,
    option,
    rounded_width,
)
from statecut.arguments import width as width_of
from statecut.data.sources import text_files
from statecut.errors import InputError
from statecut.files import check_not_overwriting, check_output_path
from statecut.hub import model_folder
from statecut.models.description import ModelFolder
from statecut.models.shapes import MixerShape
from statecut.pruning.budget import check_cut, in_words, wanted_cuts
from statecut.pruning.method import Method
from statecut.pruning.methods import METHODS, method_named
from statecut.serving.engines import ENGINES, Engine, engine_named

logger = logging.getLogger(__name__)

FISHER_UP_TO = 3_000_000_000
"""Parameters. Refitted, Fisher is best in nearly all that was measured (docs/results/lab.md), and
needs the whole model and gradients on one device; above this the default is DRRQR, which needs
neither."""
CUT, CHOOSE, READ, OUTPUT = "what to cut", "how to choose", "text", "output"
FORCE = "replace OUT if it is a model"

Dtype = Literal["bfloat16", "float32", "float16"]


@dataclass(frozen=True)
class Request:
    """What to cut from which model, and how. One of `ratio`, `state`, or `keys` and `values` (or
    one of these two) says how much."""

    model: Path | str
    out: Path | str
    # fmt: off
    ratio: float | None = option(
        None, "share of the key channels to remove, in (0, 1); values stay, but where keys and "
        "values have one width, which is then cut", CUT)
    state: float | None = option(
        None, "share of the recurrent state that may stay, in (0, 1): a few splits of it between "
        "keys and values are cut, refitted and compared on text held out, and the best is written",
        CUT, metavar="SHARE")
    keys: int | None = option(None, "key channels per head to keep", CUT, metavar="N")
    values: int | None = option(None, "value channels per head to keep", CUT, metavar="N")
    round_to: int | None = option(
        None, "with --ratio, keep a multiple of N channels, rounding up; with --state, compare "
        "only multiples of N; 1 rounds nothing (default: 16, which kernels run fastest, or less "
        "where that would leave every channel)", CUT, metavar="N")
    engine: str | None = option(
        None, "keep numbers of channels that this engine runs, with --ratio rounding up, and print "
        f"how to start it: {', '.join(ENGINES)}", CUT, flag="--for", metavar="ENGINE")
    method: str | None = option(
        None, f"see below (default: fisher up to {FISHER_UP_TO // 10**9} billion parameters, above "
        "that drrqr)", CHOOSE)
    target: Target | None = option(
        None, "whose activations choose the key channels: those of keys, queries or both; queries "
        "and keys always lose the same channels (default: the method's own, mostly kq)", CHOOSE)
    refit: bool = option(
        True, "repair the cut without training: fit the projection behind each delta rule, and the "
        "MLP's second matrix, again by least squares on the same text", CHOOSE)
    eps: Eps = option(
        "matched", "of the output norms: matched makes the cut model compute what the unpruned one "
        "does with the cut channels set to zero; kept leaves it, as the paper's code does", CHOOSE)
    seed: int = option(
        0, "of the order of the text, the sample of rows, the channels that rand samples", CHOOSE)
    text: Path | str | None = option(
        None, f"calibration text, such as the model is used for: {TEXT}", READ, metavar="FILE")
    sequences: int = option(128, "of calibration; up to 16 more are held out", READ, metavar="N")
    length: int = option(2048, "tokens per sequence", READ, metavar="N")
    rows: int = option(5000, "tokens in the sample of drrqr and qrcp", READ, metavar="N")
    batch: int = option(8, "sequences per batch", READ, metavar="N")
    dtype: Dtype | None = option(
        None, "of the weights that are written (default: the model's own, but bfloat16 for a "
        "float32 DeltaNet, whose kernel refuses it)", OUTPUT)
    device: str | None = option(None, DEVICE, OUTPUT)
    force: bool = option(False, FORCE, OUTPUT)
    # fmt: on
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method

    def command(self) -> str:
        """What was given, as it would be typed."""
        # Of all methods: which one the default is depends on the model.
        flags = {option.name: option.flag for m in METHODS.values() for option in m.takes}
        own = [f"{flags[name]} {value}" for name, value in self.options.items()]
        return " ".join([command_line("prune", self), *own])

    @property
    def wanted(self) -> str:
        """How much to cut."""
        names = ("ratio", "state", "keys", "values")
        given = {name: getattr(self, name) for name in names}
        return " ".join(f"--{name} {v:g}" for name, v in given.items() if v is not None)

    def plan(self) -> Plan:
        """What is to be done, or an error for what is wrong; nothing of it needs torch."""
        by_widths = self.keys is not None or self.values is not None
        if [self.ratio is not None, self.state is not None, by_widths].count(True) != 1:
            raise InputError(
                f"{self.wanted or 'how much to cut is missing'}: give one of --ratio, --state, or "
                "--keys and --values (one of these or both)"
            )
        for name, share, what in (
            ("ratio", self.ratio, "key channels to cut"),
            ("state", self.state, "the recurrent state that may stay"),
        ):
            if share is not None and not 0 < share < 1:
                raise InputError(f"--{name} {share:g}: must lie in (0, 1), the share of {what}")
        if self.state is not None and not self.refit:
            raise InputError(
                "--no-refit: --state compares models that are refitted, which decides between "
                "them; give --keys and --values to cut without"
            )
        if by_widths and self.round_to is not None:
            raise InputError(
                f"--round-to {self.round_to}: {self.wanted} is not rounded; leave one out"
            )
        names = ("keys", "values", "sequences", "rows", "batch", "round_to")
        check_counts(**{name: getattr(self, name) for name in names})
        check_run(self.length, self.seed, self.device)
        engine = engine_named(self.engine) if self.engine else None
        if self.method:
            method_named(self.method)
        if self.text is not None:
            text_files(Path(self.text))
        model = ModelFolder(model_folder(self.model))
        name = self.method or ("fisher" if model.parameters <= FISHER_UP_TO else "drrqr")
        method = method_named(name)
        method.check_target(self.target or method.targets[0])
        options = method.options(self.options)
        if self.state is not None or self.values is not None or model.architecture.square:
            method.check_chooses_values(options)
        shapes = self._shapes(model, engine)
        if self.target is not None and all(shape.width == model.shape.width for shape in shapes):
            raise InputError(
                f"--target {self.target}: it says what key channels are judged by, and "
                f"{self.wanted} cuts values alone; leave it out"
            )
        plan = Plan(model, method, shapes, engine, refits=self.refit, has_text=bool(self.text))
        if plan.runs_model:
            model.check_runs()
            if self.text is None:
                why = "the refit" if self.refit else f"--method {method.name}"
                raise InputError(
                    f"{why} needs text: give --text FILE ({TEXT}), such as the model is used "
                    "for; --method l1 --no-refit needs none"
                )
            from statecut.data.tokenizer import check_vocabulary, load_tokenizer  # numpy: 0.1 s

            check_vocabulary(load_tokenizer(model.folder), model.text_config["vocab_size"])
        check_out(Path(self.out), [model.folder], self.text, force=self.force)
        return plan

    def _shapes(self, model: ModelFolder, engine: Engine | None) -> list[MixerShape]:
        """What to cut to: one shape, or with --state those to compare."""
        full = model.shape
        if engine:
            engine.check_model(model.architecture.model_type)
        if self.ratio is not None:
            cut = replace(full, width=self._width(model, engine))
            if model.architecture.square:
                cut = replace(cut, value_width=cut.width)
                logger.info(
                    "--ratio %g: keys and values have one width, so both are cut, to %s; "
                    "%.0f%% of the recurrent state stays",
                    *(self.ratio, in_words(cut), 100 * cut.state_bytes() / full.state_bytes()),
                )
            return [cut]
        if self.state is None:
            values = self.values or full.value_width
            cut = replace(full, width=self.keys or full.width, value_width=values)
            check_cut(model, cut, engine)
            return [cut]
        steps = STEPS if self.round_to is None else (self.round_to,)
        step, shapes = wanted_cuts(model, self.state, engine, steps)
        few = f": those of {steps[0]} are too few" if step < steps[0] else ""
        logger.info(
            "--state %g: %s d_k x d_v of %s (multiples of %d%s)",
            *(self.state, "comparing" if len(shapes) > 1 else "no choice but"),
            *(", ".join(map(in_words, shapes)), step, few),
        )
        return shapes

    def _width(self, model: ModelFolder, engine: Engine | None) -> int:
        """floor(d_k (1 - ratio)), up to a multiple, and to what the engine takes."""
        full = model.shape.width
        exact = width_of(full, self.ratio or 0)
        kept = rounded_width(full, self.ratio or 0, self.round_to)
        if kept >= full:
            raise InputError(
                f"--round-to {self.round_to} leaves all {full} channels of a head at ratio "
                f"{self.ratio}: round to less, or cut more"
            )
        if not engine:
            return kept
        taken = (s for s in STEPS if engine.cuts(model.shape, s)[-1:] >= [exact])
        multiple = self.round_to or next(taken, 1)
        if kept != (kept := engine.round_up(exact, model.shape, multiple)):
            logger.info(
                "--for %s: %d channels per head, as %s takes %s%s",
                *(engine.name, kept, engine.label, engine.widths),
                f"; any number: {engine.instead}" if engine.instead else "",
            )
        return kept


@dataclass(frozen=True)
class Plan:
    """What a request comes to for its model."""

    model: ModelFolder
    method: Method
    shapes: list[MixerShape]  # one, or those to compare
    engine: Engine | None
    refits: bool
    has_text: bool

    @property
    def calibrates(self) -> bool:
        return "text" in self.method.needs

    @property
    def runs_model(self) -> bool:
        return self.calibrates or self.refits or self.has_text

    @property
    def cuts_values(self) -> bool:
        return any(shape.value_width < self.model.shape.value_width for shape in self.shapes)


def check_out(out: Path, models: list[Path], text: Path | str | None, *, force: bool) -> None:
    """An error if a model made from others, and from a text, may not be written there."""
    sources = models if text is None else [*models, Path(text)]
    check_not_overwriting(out, sources, kind="model", marks="config.json *.safetensors")
    check_output_path(out, force=force, folder=True)
    if any(model.resolve() in out.resolve().parents for model in models):
        raise InputError(f"{out}: lies in the model's own folder; give one outside of it")
