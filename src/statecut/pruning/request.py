"""The options of `statecut prune`, and the checks that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statecut import REFIT
from statecut.arguments import Eps, Target, check_counts, check_length, check_seed
from statecut.data.sources import text_files
from statecut.errors import InputError
from statecut.pruning.method import Method
from statecut.pruning.methods import method_named
from statecut.pruning.select import check_chooses_values
from statecut.serving.engines import Engine, engine_named


@dataclass(frozen=True)
class Request:
    """The options of the command, under their names there. One of `ratio`, `state`, or `keys` and
    `values` (or one of these two) says how much to cut."""

    model: Path
    out: Path
    method: str
    ratio: float | None = None  # share of the key channels that goes
    state: float | None = None  # share of the recurrent state that may stay
    keys: int | None = None  # channels per head that stay; all if only values are given
    values: int | None = None
    target: Target | None = None  # the method's own
    seed: int = 0
    sequences: int = 128
    length: int = 2048
    rows: int = 5000  # in the sample of the calibration
    batch: int = 8
    refit: bool | None = None  # if not given, what a comparison needs, or the default
    eps: Eps = "matched"  # of the output norm
    round_to: int | None = None  # multiples of it are kept
    engine: str | None = None  # that is to run these widths
    dtype: str | None = None  # the model's own
    text: Path | None = None
    device: str = "cpu"
    force: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method

    @property
    def refits(self) -> bool:
        return (self.state is not None or REFIT) if self.refit is None else self.refit

    @property
    def chosen_engine(self) -> Engine | None:
        return engine_named(self.engine) if self.engine else None

    def flags(self, *names: str) -> str:
        """Those options that are given, as on the command line."""
        given = {name: getattr(self, name) for name in names}
        flags = {"engine": "for", "round_to": "round-to"}
        return " ".join(
            f"--{flags.get(name, name)} {value.name if isinstance(value, Path) else value}"
            for name, value in given.items()
            if value is not None
        )

    @property
    def wanted(self) -> str:
        """How much to cut."""
        return self.flags("ratio", "state", "keys", "values")

    def command(self, target: Target | None) -> str:
        """The command that makes the same model; the target is that of the keys it cuts."""
        method = method_named(self.method)
        options = method.options(self.options)
        return " ".join(filter(None, [
            f"statecut prune {self.model.name} {self.out.name}",
            self.flags("method", "ratio", "state", "keys", "values"),
            f"--target {target}" if target else "",
            self.flags("seed", "sequences", "length", "rows"),
            f"--{'' if self.refits else 'no-'}refit --eps {self.eps}",
            *(f"{option.flag} {options[option.name]}" for option in method.takes),
            self.flags("round_to", "engine", "dtype", "text"),
        ]))  # fmt: skip

    def check(self) -> Method:
        """An error for what is wrong whatever the model; or else the method."""
        method = method_named(self.method)
        method.check_target(self.target or method.targets[0])
        options = method.options(self.options)
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
        if self.state is not None and self.refit is False:
            raise InputError(
                "--no-refit: --state compares models that are refitted, which decides between "
                "them; give --keys and --values to cut without"
            )
        if by_widths and self.round_to is not None:
            widths = self.flags("keys", "values")
            raise InputError(f"--round-to {self.round_to}: {widths} is not rounded; leave one out")
        if self.state is not None or self.values is not None:
            check_chooses_values(method, options)
        names = ("keys", "values", "sequences", "rows", "batch", "round_to")
        check_counts(**{name: getattr(self, name) for name in names})
        check_length(self.length)
        check_seed(self.seed)
        if self.text is not None:
            text_files(self.text)
        if self.engine is not None:
            engine_named(self.engine)
        return method
