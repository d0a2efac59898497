"""What a method is. Importing it costs nothing, so that the command line and the configuration,
which learn of methods from here, stay quick: methods import torch inside their functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from statecut.arguments import Target
from statecut.errors import InputError
from statecut.pruning.activations import Activations, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from statecut.pruning.statistics import ModelStatistics
else:  # for annotations only
    ModelStatistics = Tensor = Any

__all__ = ["Activations", "Method", "ModelStatistics", "Option", "Rows", "Target", "Tensor"]

Need = Literal["text", "gradients", "seed"]


@dataclass(frozen=True)
class Option:
    """Something that a method can be given, of its default's type."""

    name: str
    default: str | int | float
    help: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    flag_name: str = ""  # on the command line, if that has another option of this name

    @property
    def flag(self) -> str:
        return f"--{self.flag_name or self.name}"

    def check(self, value: Any) -> None:
        if self.choices and value not in self.choices:
            raise InputError(f"{self.name} {value}: must be {' or '.join(self.choices)}")
        if self.at_least is not None and not value >= self.at_least:
            raise InputError(f"{self.name} {value}: must be at least {self.at_least:g}")


@dataclass(frozen=True)
class Method:
    """All that a method is. It gives one of three functions, which says what kind it is:

    score(model, target, **options)           a number for each channel, (layers, heads, d_k): the
                                              highest of each head are kept
    choose(model, target, widths, **options)  for each width, `kept` (layers, heads, width), and
                                              what else there is to know of each head, by name
    rotate(model, target, **options)          rows that mix channels, (layers, heads, d_k, d_k):
                                              the first of each head are kept

    `model` is a `ModelStatistics`; `target` says whose activations choose the channels, those of
    keys, queries or both (which always lose the same ones). Options are those that it takes, and
    `seed` if it needs one. With `values` it can choose value channels, too: `target` is then "v",
    and what it gives is (layers, value heads, d_v).
    """

    name: str
    label: str  # in tables and figures
    about: str  # a sentence, for help and reference
    colour: str  # of its curves, #rrggbb
    dash: tuple[float, ...] = ()  # lengths of its strokes and gaps, in points; solid without
    needs: tuple[Need, ...] = ()  # calibration text, gradients on it, a seed
    targets: tuple[Target, ...] = ("kq", "k", "q")  # whose channels it can judge by, its own first
    values: bool = False
    takes: tuple[Option, ...] = ()
    score: Callable[..., Any] | None = None
    choose: Callable[..., Any] | None = None
    rotate: Callable[..., Any] | None = None

    @property
    def module(self) -> str:
        """Where its function is."""
        return (self.score or self.choose or self.rotate).__module__

    def check_target(self, target: str) -> None:
        if target not in self.targets:
            known = " or ".join(self.targets)
            raise InputError(f"target {target}: method {self.name} judges by {known}")

    def option(self, name: str) -> Option:
        return next(option for option in self.takes if option.name == name)

    def check_chooses_values(self, options: Mapping[str, Any]) -> None:
        """An error if it cannot choose value channels with these options."""
        if not self.values:
            raise InputError(
                f"method {self.name} chooses no value channels: fisher, drrqr, s_wanda, l1 and "
                "others do (`statecut prune --help`)"
            )
        if options.get("activations") == "normalised":
            raise InputError("activations normalised: values have no L2 norm; take raw")

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options: those given, and the others' defaults."""
        known = {option.name: option for option in self.takes}
        for name, value in given.items():
            if name not in known:
                others = ", ".join(known) or "no options"
                raise InputError(
                    f"{name} {value}: method {self.name} takes no {name}; it takes {others}"
                )
            known[name].check(value)
        return {**{name: option.default for name, option in known.items()}, **given}
