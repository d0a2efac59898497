"""Whether a delta rule can be trained in a shape, on the machine at hand.

Kernels are compiled for the number of heads and the widths of keys and values, and whether the
compiler gets them right depends on all of these: 32 key channels train in one model and crash in
another. So a verdict holds for one shape. Each is examined in a process of its own: the rule
against an fp32 recurrence, with the tiles that the tuner chose and with each of the others, since a
run at another size may choose those; then a layer against the same layer in fp32. Keys whose width
does not train are padded with zeros to the next that does (`statecut.pruning.slicing.Pad`).
"""

from __future__ import annotations

import copy
import importlib
import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from subprocess import Popen
from threading import Event
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import collect_env

from statecut.errors import InputError, nearest
from statecut.models import kernels
from statecut.models.architectures import ARCHITECTURES, RULES
from statecut.models.delta_rule import l2_normalised, recurrent_delta_rule
from statecut.models.fixes import fla, triton
from statecut.models.shapes import WIDEST, Shape
from statecut.process import Outcome, end, run_work
from statecut.version import __version__

# How often the tolerance each part may use up: a layer adds bf16 projections, filters and norms.
PARTS = {"forward": 1, "backward": 1, "tiles": 1, "layer_forward": 5, "layer_backward": 5}
HIDDEN = 256  # of the layer
OF_RULES = {"H", "K", "BT", "BC"}  # names of arguments that only the delta rules' kernels have
VERSIONED = ("torch", "triton", "flash-linear-attention", "transformers")

Errors = dict[str, float]  # relative ones, by what they are of
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ShapeVerdict:
    """Whether a shape trains, only infers, or crashes, with the relative errors of its parts."""

    shape: Shape
    verdict: Literal["trains", "infers only", "crashes"]
    padded_to: int | None = None  # keys of a shape that does not train; None if no width does
    reason: str = ""  # why it does not train
    errors: Errors = field(default_factory=dict)  # of the rule: o, dq, dk, dv, dbeta, dg
    tiles: Errors = field(default_factory=dict)  # the worst of each kernel over all its tiles
    layer: Errors = field(default_factory=dict)  # o, and the gradients of input and weights
    tolerance: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def trains(self) -> bool:
        return self.verdict == "trains"

    @property
    def trainable(self) -> bool:
        return self.trains or self.padded_to is not None


def check_shapes(
    shapes: Iterable[Shape], *, length: int = 256, tolerance: float = 0.01,
    device: str | None = None, limit_s: float = 900.0, jobs: int = 1,
) -> Iterator[ShapeVerdict]:  # fmt: skip
    """A verdict for each, `jobs` at a time, by sequences of `length` tokens. `tolerance` is for
    errors against fp32. Without a GPU in this process: imports would cost more than the work."""
    device = device or default_device()
    gpu = device == "cuda"

    processes: list[Popen[bytes]] = []
    ended = Event()

    def opened(process: Popen[bytes]) -> None:
        processes.append(process)
        if ended.is_set():  # it was opened while the others were ended
            raise KeyboardInterrupt

    @cache  # shapes that failed share what is found out about those to pad them to
    def examined(shape: Shape) -> ShapeVerdict:
        work = examine, shape, length, device
        outcome = run_work(*work, limit_s=limit_s, own_process=gpu, opened=opened)
        return judge(shape, tolerance, outcome)

    def checked(shape: Shape) -> ShapeVerdict:
        if examined(shape).trains:
            return examined(shape)
        # Kernels work in powers of two anyway.
        wider = (replace(shape, width=2**i) for i in range(4, 9) if 2**i > shape.width)
        padded_to = next((other.width for other in wider if examined(other).trains), None)
        return replace(examined(shape), padded_to=padded_to)

    if jobs == 1 or not gpu:  # one process has one random state
        yield from map(checked, dict.fromkeys(shapes))
        return
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(checked, dict.fromkeys(shapes))
        finally:  # after Ctrl-C the pool would wait for all that its threads go on to
            ended.set()
            for process in processes:
                end(process)


def judge(shape: Shape, tolerance: float, outcome: Outcome) -> ShapeVerdict:
    """The verdict that follows from what a process yielded before it ended."""
    parts: dict[str, Any] = {part: {} for part in ("machine", *PARTS)} | dict(outcome.values)
    wrong = [
        f"{part.replace('_', ' ')}: {name} is off by {error:.2g}"
        for part, times in PARTS.items()
        for name, error in parts[part].items()
        if not error <= times * tolerance
    ]
    reason = "; ".join(filter(None, [outcome.reason, *wrong]))
    infers = parts["forward"].get("o", math.inf) <= tolerance
    return ShapeVerdict(
        shape,
        "trains" if not reason else "infers only" if infers else "crashes",
        reason=reason,
        errors=parts["forward"] | parts["backward"],
        tiles=parts["tiles"],
        layer=parts["layer_forward"] | parts["layer_backward"],
        tolerance=tolerance,
        machine=parts["machine"],
        seconds=outcome.seconds,
    )


def examine(shape: Shape, length: int, device: str) -> Iterator[tuple[str, Any]]:
    """The machine, then the errors of each part, by name: a part that is missing did not end."""
    yield "machine", machine(device)
    kernels.prepare()
    for tuner in tuners():
        triton.skip_timing(tuner)
        if not OF_RULES & set(tuner.keys):  # filters and norms: not in question, so not searched
            tuner.configs = tuner.configs[:1]
    low, high = used_dtype(device), torch.float32  # what is checked, and against what
    if device == "cpu":  # with two heads: its recurrence would take long
        shape = replace(shape, heads=2, value_heads=2 * shape.value_heads // shape.heads)
        high = torch.float64
    torch.manual_seed(0)
    inputs = _inputs(shape, length, device, low)
    upstream = torch.randn_like(inputs["v"])
    exact = _run(_recurrence, inputs, upstream, high)
    rules = [_kernel(shape, options) for options in call_options(shape)]
    with torch.no_grad():
        yield "forward", {"o": _worst(relative_error(rule(**inputs), exact["o"]) for rule in rules)}

    def errors() -> Errors:
        calls = [_errors(_run(rule, inputs, upstream, low), exact) for rule in rules]
        return {name: _worst(call[name] for call in calls) for name in exact}

    yield "backward", errors()
    yield "tiles", dict(over_all_tiles(lambda: _worst(errors().values())))

    gated = RULES[shape.kernel].gated
    layer = random_layer(shape, device, hidden_size=HIDDEN, use_gate=gated)
    x = torch.randn(1, length, HIDDEN, device=device, dtype=low)
    upstream = torch.randn_like(x)
    with fla.plain_kernels_in_place():
        exact = _run_layer(copy.deepcopy(layer).to(high), x.to(high), upstream)
    with torch.no_grad():
        yield "layer_forward", {"o": relative_error(layer(x)[0], exact["o"])}
    yield "layer_backward", _errors(_run_layer(layer, x, upstream), exact)


def call_options(shape: Shape) -> list[Mapping[str, Any]]:
    """What layers with rules of that shape call them with, each once: the worst of them counts."""
    calls = [
        kind.call.options
        for kind in ARCHITECTURES.values()
        if kind.rule and kind.rule.name == shape.kernel
    ]
    return [call for at, call in enumerate(calls) if call not in calls[:at]]


def _inputs(shape: Shape, length: int, device: str, dtype: torch.dtype) -> Tensors:
    """q, k (B, T, H, d_k), v (B, T, V, d_v), beta and, gated, g (B, T, V or V, d_k), as layers make
    them, with H heads of keys and V of values."""
    draw = partial(torch.randn, 2 if device == "cuda" else 1, length, device=device)
    inputs = {
        "q": F.silu(draw(shape.heads, shape.width)),
        "k": F.silu(draw(shape.heads, shape.width)),
        "v": F.silu(draw(shape.value_heads, shape.value_width)),
        "beta": draw(shape.value_heads).sigmoid(),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    rule = RULES[shape.kernel]
    if rule.gated:  # in fp32, as the gate is; decays of 0.5 to 1
        channels = [shape.width] if rule.per_channel else []
        inputs["g"] = F.logsigmoid(draw(shape.value_heads, *channels) + 3)
    return inputs


def _kernel(shape: Shape, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The chunked rule under test: o (B, T, V, d_v) from the inputs by name."""
    module = importlib.import_module(ARCHITECTURES[shape.kernel].call.module)
    chunked = getattr(module, RULES[shape.kernel].chunked)
    return lambda **inputs: chunked(**inputs, use_qk_l2norm_in_kernel=True, **options)[0]


def _recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None) -> Tensor:
    """The same, one token after another. A key head may serve several value heads."""
    q, k = (l2_normalised(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    B, _, H, d_k = q.shape
    state = v.new_zeros(B, H, d_k, v.shape[-1])
    g = torch.zeros_like(beta) if g is None else g
    return recurrent_delta_rule(q, k, v, beta, g, d_k**-0.5, state)[0]


def _run(
    rule: Callable[..., Tensor], inputs: Tensors, upstream: Tensor, dtype: torch.dtype
) -> Tensors:
    """Its output and gradients, all inputs of that type; a gate is never below fp32."""
    types = {name: torch.promote_types(x.dtype, dtype) for name, x in inputs.items()}
    leaves = {name: x.detach().to(types[name]).requires_grad_() for name, x in inputs.items()}
    return _gradients(rule(**leaves), leaves, upstream)


def _run_layer(layer: Any, x: Tensor, upstream: Tensor) -> Tensors:
    x = x.detach().requires_grad_()
    return _gradients(layer(x)[0], {"x": x, **dict(layer.named_parameters())}, upstream)


def _gradients(o: Tensor, leaves: Tensors, upstream: Tensor) -> Tensors:
    gradients = torch.autograd.grad(o, [*leaves.values()], upstream.to(o.dtype))
    names = (f"d{name}" for name in leaves)
    return {"o": o.detach(), **dict(zip(names, gradients, strict=True))}


def _errors(result: Tensors, exact: Tensors) -> Errors:
    return {name: relative_error(result[name], exact[name]) for name in exact}


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def _worst(errors: Iterable[float]) -> float:
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def over_all_tiles(worst: Callable[[], float]) -> Iterator[tuple[str, float]]:
    """Of each tuned kernel that ran, the largest error that any tile it may choose leads to."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    for tuner in [tuner for tuner in tuners() if tuner.cache]:
        chosen, errors = dict(tuner.cache), [0.0]
        for config in tuner.configs:
            tuner.cache.update(dict.fromkeys(chosen, config))
            with suppress(OutOfResources, CompileTimeAssertionFailure, PTXASError):  # as tuners do
                errors.append(worst())
        tuner.cache.update(chosen)
        yield tuner.base_fn.__name__, _worst(errors)


def tuners() -> list[Any]:
    """The kernels that choose tiles by trying all of them, in the modules of fla so far."""
    from triton.runtime.autotuner import Autotuner

    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    found = {}
    for value in [value for module in modules for value in vars(module).values()]:
        while type(value).__module__.startswith(("triton.", "fla.")):
            if isinstance(value, Autotuner):
                found[id(value)] = value
            value = getattr(value, "fn", None)
    return [*found.values()]


# --- what timings use, too ---


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def used_dtype(device: str) -> torch.dtype:
    """bf16 as models are used; many CPUs have no fast one."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def random_layer(shape: Shape, device: str, *, hidden_size: int, use_gate: bool) -> Any:
    """A mixer layer, its weights the same for the same device."""
    kernels.prepare()
    torch.manual_seed(0)
    sizes = {"num_heads": shape.heads, "width": shape.width, "num_v_heads": shape.value_heads}
    sizes |= {"head_v_dim": shape.value_width, "hidden_size": hidden_size}
    with torch.device(device):
        return RULES[shape.kernel].layer(**sizes, use_gate=use_gate).to(used_dtype(device))


def machine(device: str) -> dict[str, Any]:
    """The device, whose kernels run on it, and the versions of all that takes part."""
    gpu = device == "cuda"
    versions = {"statecut": __version__, "python": platform.python_version()}
    for name in VERSIONED:
        versions[name] = "unknown"  # a folder on the path, never installed
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "device": device,
        "dtype": str(used_dtype(device)).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if gpu else None,
        "backend": "triton" if gpu else "plain PyTorch",
        "versions": versions,
    }


# --- the command ---

TABLE_HEAD = "shape                           verdict      pad to     rule   tiles   layer   time"


def table_row(verdict: ShapeVerdict) -> str:
    """A line of the table: the worst errors of the rule, of all its tiles, of the layer."""
    parts = (verdict.errors, verdict.tiles, verdict.layer)
    errors = " ".join(f"{_worst(part.values()):7.1e}" if part else f"{'-':>7}" for part in parts)
    pad = verdict.padded_to or ("-" if verdict.trains else "none")
    line = f"{verdict.shape.name:31} {verdict.verdict:11}  {pad!s:>6}  {errors}"
    return f"{line}  {verdict.seconds:3.0f} s  {verdict.reason}".rstrip()


def requested_shapes(
    kernel: Any, widths: str, heads: int | None, value_heads: int | None, value_width: int | None
) -> list[Shape]:
    """One for each width; heads and values as published models have them unless they are given."""
    if (rule := RULES.get(kernel)) is None:
        raise InputError(f"kernel {kernel!r} does not exist{nearest(str(kernel), RULES)}")
    if not all(number.strip().isdigit() for number in widths.split(",")):
        raise InputError(f"--widths {widths}: give whole numbers, as in 128,64,32")
    heads = rule.heads if heads is None else heads
    value_heads = heads if value_heads is None else value_heads
    value_width = rule.value_width if value_width is None else value_width
    if min(heads, value_heads, value_width) < 1:
        raise InputError("heads and their widths must be 1 or more")
    if value_heads % heads or (not rule.grouped and value_heads != heads):
        needed = "a multiple of" if rule.grouped else "as many as"
        raise InputError(f"{value_heads} value heads: {kernel} has {needed} its {heads} key heads")
    numbers = dict.fromkeys(map(int, widths.split(",")))
    if wrong := [number for number in numbers if not 1 <= number <= WIDEST]:
        raise InputError(f"width {wrong[0]}: the kernels take 1 to {WIDEST} channels per head")
    return [Shape(kernel, heads, width, value_heads, value_width) for width in numbers]
