"""What arguments may be: the words and checks that commands, functions and configurations share."""

from __future__ import annotations

import shlex
from dataclasses import field, fields
from decimal import Decimal
from fractions import Fraction
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from statecut.errors import InputError

Target = Literal["kq", "k", "q"]
"""Whose activations choose the channels; queries and keys always lose the same ones."""
Eps = Literal["matched", "kept"]
"""What a cut does to the eps of the output norm: `statecut.pruning.slicing`."""

TEXT = ".jsonl, .txt (.xz .gz .zst), .parquet, or a data set's folder"
DEVICE = "cuda or cpu (default: the GPU if there is one)"
LARGEST_SEED = 2**63 - 1
"""torch and the frame of results take no larger one."""


def check_seed(seed: int) -> None:
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"--seed {seed}: must lie between 0 and {LARGEST_SEED}")


def check_counts(**options: int | None) -> None:
    """Of options that count something, by name; None is one that is not given."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be 1 or more")


def check_word(name: str, value: Any, hint: Any) -> None:
    """Of an option whose type is a few words, or these and None; others are not looked at."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words and value not in words and not (value is None and type(None) in kinds):
        raise InputError(f"--{name} {value}: give {' or '.join(words)}")


def check_length(length: int) -> None:
    if length < 2:
        raise InputError(
            f"--length {length}: must be 2 or more, as a token is predicted from those before it"
        )


def check_run(length: int, seed: int, device: str | None) -> None:
    """Of a command that runs a model on text. Whether there is a GPU is not known without torch."""
    check_length(length)
    check_seed(seed)
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"--device {device}: give cpu or cuda")


def width(d_k: int, ratio: float | str | Decimal | Fraction) -> int:
    """Channels left of `d_k` after cutting `ratio`: floor(d_k (1 - ratio)), in exact arithmetic.

    The ratio is what its decimal text says: in floating point 10 * (1 - 0.9) is below 1.
    """
    try:
        exact = Fraction(str(ratio))
    except ValueError:  # nan or an infinity
        exact = None
    if exact is None or not 0 <= exact < 1:
        raise InputError(f"ratio {ratio}: must lie in (0, 1), or be 0 for a model left whole")
    left = int(d_k * (1 - exact))
    if left < 1:
        raise InputError(f"ratio {ratio} leaves no channel of {d_k}; choose a smaller one")
    return left


STEPS = (16, 8, 4, 2, 1)
"""Widths are multiples of the first, which kernels compute fastest, or else of the next ones."""


def rounded_width(d_k: int, ratio: float, round_to: int | None = None) -> int:
    """Channels left after cutting `ratio`, rounded up to a multiple: without `round_to` of the
    first step that leaves fewer than all."""
    left = width(d_k, ratio)
    multiples = [-(-left // step) * step for step in ((round_to,) if round_to else STEPS)]
    return next((multiple for multiple in multiples if multiple < d_k), min(multiples[0], d_k))


def option(default: Any, help: str, group: str = "", **more: Any) -> Any:
    """A field of a request that a command offers as an option; `more` goes to argparse. So an
    option stands in one place: its name, type and default, and what it says on the command line."""
    return field(default=default, metadata={"help": help, "group": group, "argparse": more})


def command_line(name: str, request: Any) -> str:
    """The command that makes a request, as it would be typed."""
    words = ["statecut", name]
    for one in (one for one in fields(request) if one.name != "options"):
        value = getattr(request, one.name)
        flag = one.metadata.get("argparse", {}).get("flag", f"--{one.name.replace('_', '-')}")
        if not one.metadata:
            words.append(str(value))
        elif isinstance(value, bool) and value != one.default:
            words.append(flag if value else f"--no-{one.name}")
        elif value != one.default:
            words += [flag, str(value)]
    return shlex.join(words)
