"""Which tile each of fla's kernels uses: chosen once for a kind of GPU, and kept.

A tuned kernel may use dozens of tiles. Triton compiles and times all of them when it meets a new
shape: for a minute or more, in every process that starts meanwhile, and again for every number of
heads. Here the first process that needs a choice makes it while the others wait for it, and it
serves all numbers of heads, sequences and tokens: they change how many tiles there are, not which
one is fast. Choices are kept beside the kernels that Triton compiled (TRITON_CACHE_DIR/tiles);
those for GPUs that Statecut was measured on come with it (tuned/*.json, by benchmarks/tiles.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from reproduction.running.locks import exclusive_lock, in_turn
from statecut.files import digest, read_json, write_json

COUNTS = {"B", "H", "HV", "NB"}  # sequences, heads of keys and of values, blocks of tokens
TRIAL_MS = (5, 20)  # warm-up and runs of one candidate; Triton's own are 25 and 100
SHIPPED = Path(__file__).parent / "tuned"


def kept_choice(
    tuner: Any, key: tuple[Any, ...], candidates: list[Any], choose: Callable[[], None]
) -> bool:
    """Give the tuner its tile for a key, and say whether it was known: for `check_disk_cache`.

    A tile that is not among the candidates, of another version or left out since, is none.
    """
    kernel, widths = kernel_name(tuner), widths_of(key_names(tuner), key)
    path = folder() / f"{digest([kernel, widths])[:24]}.json"

    def known() -> bool:
        kept = [read_json(path)["tile"]] if path.is_file() else []
        kept.append(shipped().get(kernel, {}).get(widths))
        for candidate in candidates:
            if tile(candidate) in kept:
                tuner.cache[key] = candidate
                return True
        return False

    if known():
        return True
    # One message for each of some dozen kernels in every process would bury all others.
    with exclusive_lock([path], level=logging.DEBUG):
        if known():  # another process has chosen it meanwhile
            return True
        choose()
        choice = {"kernel": kernel, "widths": widths, "tile": tile(tuner.cache[key])}
        write_json(path, choice)
    return False


def short_trial(tuner: Any, call: Callable[[], None], quantiles: tuple[float, ...]) -> Any:
    """The median time of a candidate and its quantiles: for `do_bench`."""
    from triton.testing import do_bench

    if tuner._do_bench is not None:
        return tuner._do_bench(call, quantiles=quantiles)
    with in_turn(folder() / "trial.lock"):  # another process on the GPU would distort it
        return do_bench(call, warmup=TRIAL_MS[0], rep=TRIAL_MS[1], quantiles=quantiles)


def kernel_name(tuner: Any) -> str:
    """Qualified by its module: two rules have kernels of the same name."""
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__}"


def key_names(tuner: Any) -> list[str]:
    """The names of the values in its keys. What candidates set themselves is in no key, even if it
    is listed as one."""
    return [name for name in tuner.keys if name not in tuner.configs[0].kwargs]


def widths_of(names: list[str], key: tuple[Any, ...]) -> str:
    """A tuning key as text, without counts: values by name, then the types of tensors."""
    types = [str(value) for value in key if str(value).startswith("torch.")]
    values = key[: len(key) - len(types)]
    if len(values) != len(names):  # some were not given: which is not known
        return " ".join(map(str, key))
    named = [f"{name}={v}" for name, v in zip(names, values, strict=True) if name not in COUNTS]
    return " ".join([*named, *(kind.removeprefix("torch.") for kind in types)])


def tile(config: Any) -> str:
    """A candidate as text."""
    return " ".join(f"{name}={value}" for name, value in config.all_kwargs().items())


def folder() -> Path:
    """Where choices made on this machine are kept, for this GPU and these versions."""
    from triton import knobs

    return Path(knobs.cache.dir) / "tiles" / "-".join([gpu(), *versions().values()])


@cache
def shipped() -> dict[str, dict[str, str]]:
    """Tiles by kernel, then by widths, for this GPU and these versions, if they were measured."""
    path = SHIPPED / f"{gpu()}.json"
    record = read_json(path) if path.is_file() else {}
    return record["tiles"] if record.get("versions") == versions() else {}


@cache
def gpu() -> str:
    """The name of the GPU, as a file's."""
    import torch

    return re.sub(r"\W+", "_", torch.cuda.get_device_name())


def versions() -> dict[str, str]:
    """The packages that decide which candidates there are and how they are compiled."""
    import fla
    import triton

    return {"triton": triton.__version__, "flash-linear-attention": fla.__version__}
