"""Whether a delta rule can be trained in a shape, on the machine at hand.

Kernels are compiled for the number of heads and the widths of keys and values, and whether the
compiler gets them right depends on all of these: 32 key channels train in one model and crash in
another. So a verdict holds for one shape.

In a process of its own: forward and backward pass of the kernel against the fp32 recurrence, for
the tiles that the tuner chose and then for each of the others, since a run at another size may
choose those; then a whole layer against the same layer in fp32. Keys whose width does not train
are padded with zeros to the next one that does (`keycut.slicing.Pad`).
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from keycut.artefact import check_writable, read_json, write_json
from keycut.benchmarking.process import Outcome, Worker, apart_by_default, here
from keycut.benchmarking.tuning import of_a_rule, tuners
from keycut.config import Preflight, Shape
from keycut.errors import InputError, nearest
from keycut.models.architectures import RULES
from keycut.models.architectures.base import DeltaRule
from keycut.patches import fla, triton

WIDEST = 256
"""The kernels take no wider keys."""

LIMIT_S = 900.0
LAYER_TOLERANCE = 5  # times that of the rule: a layer adds bf16 projections, filters and norms
HIDDEN = 256

CPU_HEADS = 2  # a CPU's recurrence would take long

Word = Literal["trains", "infers only", "crashes"]
Errors = dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """What a shape is good for. `errors` are relative, the norm of a difference over a norm."""

    shape: Shape
    verdict: Word
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
    def has_a_way(self) -> bool:
        return self.trains or self.padded_to is not None


def check_shape(
    shape: Shape,
    settings: Preflight,
    out: Path | str,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    apart: bool | None = None,
) -> Verdict:
    """Check one shape, and those to pad it to if need be, and write the verdict as JSON."""
    refuse_shape(shape)
    check_writable(out)
    verdict = check_shapes([shape], settings, device=device, limit_s=limit_s, apart=apart)[0]
    write_json(out, asdict(verdict))
    return verdict


def read(path: Path | str) -> Verdict:
    """What `check_shape` wrote."""
    record = read_json(path)
    try:
        return from_json(record)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a preflight of Keycut ({error!r})") from None


def padding(path: Path | str, *, may_pad: bool = True) -> int | None:
    """The width that keys are padded to for training, None for their own, by what was written.

    An error if neither trains, or if it was another GPU that was checked.
    """
    import torch

    verdict = read(path)
    checked = verdict.machine.get("gpu")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if checked != here:
        raise InputError(
            f"{path}: {checked or 'a CPU'} was checked, and this is {here or 'a CPU'}: have all "
            "jobs run on one kind of GPU (`gpu_model` in the profile of a cluster), or delete the "
            "file to have it checked again"
        )
    if not (verdict.has_a_way if may_pad else verdict.trains):
        raise InputError(f"{path}: {verdict.shape.name} cannot be trained here: {verdict.reason}")
    return verdict.padded_to


def from_json(record: dict[str, Any]) -> Verdict:
    return Verdict(**record | {"shape": Shape(**record["shape"])})


def check_shapes(
    shapes: list[Shape],
    settings: Preflight,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    jobs: int = 1,
    apart: bool | None = None,
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """A verdict for each, `jobs` at a time, each in a process of its own; `tell` hears each once
    it is known. Shapes that failed share what is found out about those to pad them to."""
    for shape in shapes:
        refuse_shape(shape)
    own_process = apart_by_default() if apart is None else apart
    known: dict[Shape, Verdict] = {}

    def look(wanted: list[Shape]) -> None:
        new = [one for one in dict.fromkeys(wanted) if one not in known]
        # Threads of one process would share a random state.
        with ThreadPoolExecutor(jobs if own_process else 1) as pool:
            given = (settings, limit_s, own_process, device)
            futures = {pool.submit(_examined, one, *given): one for one in new}
            for future in as_completed(futures):
                verdict = known[futures[future]] = future.result()
                if verdict.trains and verdict.shape in shapes:
                    tell(verdict)

    look(shapes)
    open_ends = {one: wider(one) for one in shapes if not known[one].trains}
    while open_ends:
        look([rest[0] for rest in open_ends.values() if rest])
        for one, rest in list(open_ends.items()):
            if rest and not known[rest[0]].trains:
                open_ends[one] = rest[1:]
                continue
            known[one] = replace(known[one], padded_to=rest[0].width if rest else None)
            tell(known[one])
            del open_ends[one]
    return [known[one] for one in shapes]


def wider(shape: Shape) -> list[Shape]:
    """Shapes to pad to, the narrowest first: kernels work in powers of two anyway."""
    powers = (2**i for i in range(4, 9))
    return [replace(shape, width=power) for power in powers if power > shape.width]


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    configfile: Path | None = None
    kernel: str | None = None
    widths: str | None = None
    heads: int | None = None
    value_heads: int | None = None
    value_width: int | None = None
    json: Path | None = None
    limit_s: float = LIMIT_S
    jobs: int = 1


def preflight(request: Request) -> bool:
    """Check all that was asked for, a line each, and say whether every shape has a way."""
    import torch

    shapes, settings = _asked(request)
    if request.jobs < 1 or request.limit_s <= 0:
        raise InputError("--jobs must be 1 or more, and --limit more than 0")
    gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if gpu else "no GPU: checking the plain PyTorch of a CPU")
    print(f"{'kernel':14} {'keys':>7} {'values':>7}  {'verdict':11}  {'pad to':>6}  {'rule':>7} "
          f"{'tiles':>7} {'layer':>7}  {'time':>5}")  # fmt: skip

    def tell(verdict: Verdict) -> None:
        print(row(verdict), flush=True)
        if request.json is not None:
            write_json(request.json / f"{verdict.shape.name}.json", asdict(verdict))

    found = check_shapes(shapes, settings, limit_s=request.limit_s, jobs=request.jobs, tell=tell)
    return all(verdict.has_a_way for verdict in found)


def _asked(request: Request) -> tuple[list[Shape], Preflight]:
    from keycut.config import load_config
    from keycut.models.adoption import refuse_contradictions

    if (request.configfile is None) == (request.kernel is None):
        raise InputError("give either --configfile, or --kernel and --widths")
    if request.configfile is not None:
        config = load_config(request.configfile)
        refuse_contradictions(config)
        return list(config.trained_shapes()), config.preflight
    numbers = (request.widths or "").split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise InputError(f"--widths {request.widths}: give whole numbers, as in 128,64,32")
    asked = dict.fromkeys(_shape(request, int(number)) for number in numbers)
    for shape in asked:
        refuse_shape(shape)
    return list(asked), Preflight(length=256, tolerance=0.01)


def _shape(request: Request, width: int) -> Shape:
    kernel: Any = request.kernel  # `refuse_shape` looks at it
    rule = RULES.get(kernel)
    heads, value_width = (rule.heads, rule.value_width) if rule else (1, 1)
    heads = heads if request.heads is None else request.heads
    return Shape(
        kernel,
        heads,
        width,
        heads if request.value_heads is None else request.value_heads,
        value_width if request.value_width is None else request.value_width,
    )


def row(verdict: Verdict) -> str:
    """A line of the table: the worst errors of the rule, of all its tiles, of the layer."""
    parts = (verdict.errors, verdict.tiles, verdict.layer)
    errors = " ".join(f"{max(part.values()):7.1e}" if part else f"{'-':>7}" for part in parts)
    pad = verdict.padded_to or ("-" if verdict.trains else "none")
    shape = verdict.shape
    keys, values = f"{shape.heads}x{shape.width}", f"{shape.value_heads}x{shape.value_width}"
    line = (
        f"{shape.kernel:14} {keys:>7} {values:>7}  {verdict.verdict:11}  {pad!s:>6}  {errors}  "
        f"{verdict.seconds:3.0f} s"
    )
    return f"{line}  {verdict.reason}".rstrip()


def refuse_shape(shape: Shape) -> None:
    if shape.kernel not in RULES:
        raise InputError(f"kernel {shape.kernel!r} is none{nearest(shape.kernel, RULES)}")
    if not 1 <= shape.width <= WIDEST:
        raise InputError(
            f"width {shape.width} for {shape.kernel}: the kernels take 1 to {WIDEST} channels per "
            "head"
        )
    if min(shape.heads, shape.value_heads, shape.value_width) < 1:
        raise InputError(f"{shape.name}: heads and their widths must be 1 or more")
    if shape.value_heads % shape.heads:
        raise InputError(
            f"{shape.value_heads} value heads must be a multiple of {shape.heads} key heads"
        )
    if not RULES[shape.kernel].grouped and shape.value_heads != shape.heads:
        raise InputError(f"{shape.kernel} has as many value heads as key heads")


def _examined(
    shape: Shape, settings: Preflight, limit_s: float, apart: bool, device: str | None
) -> Verdict:
    given = (examine, shape, settings.length, device)
    outcome = Worker(()).run(*given, limit_s=limit_s) if apart else here(*given)
    return judged(shape, settings.tolerance, outcome)


def judged(shape: Shape, tolerance: float, outcome: Outcome) -> Verdict:
    """The verdict that follows from what a process found before it ended."""
    found = dict(outcome.found)
    forward, backward = found.get("forward"), found.get("backward", {})
    layer = {**found.get("layer_forward", {}), **found.get("layer_backward", {})}
    verdict = Verdict(
        shape,
        "trains",
        errors={**(forward or {}), **backward},
        tiles=found.get("tiles", {}),
        layer=layer,
        tolerance=tolerance,
        machine=found.get("machine", {}),
        seconds=outcome.seconds,
    )
    limits = {"forward": 1, "backward": 1, "tiles": 1, "layer_forward": LAYER_TOLERANCE,
              "layer_backward": LAYER_TOLERANCE}  # fmt: skip
    wrong = [
        f"{part.replace('_', ' ')}: {name} is off by {error:.2g}"
        for part, limit in limits.items()
        for name, error in found.get(part, {}).items()
        if not error <= limit * tolerance
    ]
    if not outcome.reason and not wrong:
        return verdict
    reason = "; ".join([*([outcome.reason] if outcome.reason else []), *wrong])
    infers = forward is not None and all(error <= tolerance for error in forward.values())
    return replace(verdict, verdict="infers only" if infers else "crashes", reason=reason)


# --- what happens in the process of a shape ---


def examine(shape: Shape, length: int, device: str | None = None) -> Iterator[tuple[str, Any]]:
    """The machine, then the errors of each part, by name: a part that is missing did not end."""
    import torch

    from keycut.benchmarking.machine import default_device, machine
    from keycut.models import kernels

    device = device or default_device()
    if device == "cpu":
        values = CPU_HEADS * shape.value_heads // shape.heads
        shape = replace(shape, heads=CPU_HEADS, value_heads=values)
    yield "machine", machine(device)
    kernels.prepare()
    for tuner in tuners():
        triton.skip_timing(tuner)
        if not of_a_rule(tuner):  # filters and norms: not in question, so not searched
            tuner.configs = tuner.configs[:1]
    torch.manual_seed(0)
    inputs = _inputs(shape, length, device)
    upstream = torch.randn_like(inputs["v"])
    low, high = _types(device)
    exact_o, exact = _gradients(_recurrence, inputs, upstream, high)
    rule = _kernel(RULES[shape.kernel], device)
    with torch.no_grad():
        yield "forward", {"o": relative(rule(**inputs), exact_o)}
    o, found = _gradients(rule, inputs, upstream, low)
    backward = {f"d{name}": relative(found[name], exact[name]) for name in exact}
    yield "backward", {"o": relative(o, exact_o), **backward}

    def worst() -> float:
        o, found = _gradients(rule, inputs, upstream, low)
        errors = [relative(found[name], exact[name]) for name in exact]
        return max([relative(o, exact_o), *errors], key=lambda e: math.inf if e != e else e)

    yield "tiles", dict(over_all_tiles(worst))
    yield from _examine_layer(shape, length, device)


def _types(device: str) -> tuple[Any, Any]:
    """What is checked, and what it is checked against: one type higher."""
    import torch

    return (torch.float32, torch.float64) if device == "cpu" else (torch.bfloat16, torch.float32)


def relative(found: Any, exact: Any) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _inputs(shape: Shape, length: int, device: str) -> dict[str, Any]:
    """q, k (B, T, H, d_k), v (B, T, V, d_v), beta and, gated, g (B, T, V), as layers make them,
    with H heads of keys and V of values."""
    import torch
    import torch.nn.functional as F

    B = 2 if device == "cuda" else 1

    def draw(*each: int) -> torch.Tensor:
        return torch.randn(B, length, *each, device=device)

    inputs = {
        "q": F.silu(draw(shape.heads, shape.width)),
        "k": F.silu(draw(shape.heads, shape.width)),
        "v": F.silu(draw(shape.value_heads, shape.value_width)),
        "beta": draw(shape.value_heads).sigmoid(),
    }
    low, _ = _types(device)
    inputs = {name: x.to(low) for name, x in inputs.items()}
    if RULES[shape.kernel].gated:
        # In fp32, as the gate is; decays of 0.5 to 1.
        inputs["g"] = F.logsigmoid(draw(shape.value_heads) + 3)
    return inputs


def _kernel(rule: DeltaRule, device: str) -> Callable[..., Any]:
    """The chunked rule under test: o (B, T, H, d_v) from the inputs by name."""
    if device == "cpu":
        chunked = next(plain for _, name, plain in fla.stand_ins() if name == rule.chunked)
    else:
        chunked = getattr(importlib.import_module("fla.ops"), rule.chunked)
    return lambda **inputs: chunked(**inputs, use_qk_l2norm_in_kernel=True, **rule.options)[0]


def _recurrence(**inputs: Any) -> Any:
    """The same, one token after another."""
    from keycut.models.delta_rule import l2_normalised, recurrent_delta_rule

    v, beta = inputs["v"], inputs["beta"]
    # Each key head serves several value heads, if there are more of those.
    q, k = (
        l2_normalised(inputs[name]).repeat_interleave(v.shape[2] // inputs[name].shape[2], 2)
        for name in "qk"
    )
    g = inputs.get("g", beta.new_zeros(beta.shape))
    B, _, H, d_k = q.shape
    state = v.new_zeros(B, H, d_k, v.shape[-1])
    return recurrent_delta_rule(q, k, v, beta, g, d_k**-0.5, state)[0]


def _gradients(
    rule: Callable[..., Any], inputs: dict[str, Any], upstream: Any, dtype: Any
) -> tuple[Any, dict[str, Any]]:
    """Output and gradients, all inputs of that type; a gate is never below fp32."""
    import torch

    given = {
        name: x.to(torch.promote_types(x.dtype, dtype)).detach().clone().requires_grad_()
        for name, x in inputs.items()
    }
    o = rule(**given)
    o.backward(upstream.to(o.dtype))
    return o.detach(), {name: x.grad for name, x in given.items()}


def over_all_tiles(worst: Callable[[], float]) -> Iterator[tuple[str, float]]:
    """Of each tuned kernel that ran, the largest error that any tile it may choose leads to."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    for tuner in list(tuners()):
        if not tuner.cache:
            continue
        chosen, largest = dict(tuner.cache), 0.0
        for config in candidates(tuner):
            tuner.cache.update(dict.fromkeys(chosen, config))
            try:
                error = worst()
            except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
                continue  # the tuner passes over these too
            largest = error if error != error else max(largest, error)
        tuner.cache.update(chosen)
        yield tuner.base_fn.__name__, largest


def candidates(tuner: Any) -> list[Any]:
    """The tiles that a kernel may choose from, in the calls that it has seen."""
    configs: list[Any] = tuner.configs
    if tuner.base_fn.__name__ == fla.MISCOMPILED_KERNEL:
        for key in tuner.cache:
            configs = fla.compiled_right(configs, key[tuner.keys.index("BK")])
    return configs


def _examine_layer(shape: Shape, length: int, device: str) -> Iterator[tuple[str, Errors]]:
    import torch

    from keycut.benchmarking.layers import mixer

    low, high = _types(device)
    layer = mixer(
        shape.kernel,
        hidden_size=HIDDEN,
        num_heads=shape.heads,
        width=shape.width,
        head_v_dim=shape.value_width,
        num_v_heads=shape.value_heads,
        use_gate=RULES[shape.kernel].gated,
        device=device,
        dtype=low,
    ).train()
    exact_layer = copy.deepcopy(layer).to(high)
    x = torch.randn(1, length, HIDDEN, device=device, dtype=low)
    upstream = torch.randn_like(x)
    with fla.plain_kernels_in_place():
        exact_o, exact = _layer_gradients(exact_layer, x.to(high), upstream)
    with torch.no_grad():
        yield "layer_forward", {"o": relative(layer(x)[0], exact_o)}
    _, found = _layer_gradients(layer, x, upstream)
    yield "layer_backward", {name: relative(found[name], exact[name]) for name in exact}


def _layer_gradients(layer: Any, x: Any, upstream: Any) -> tuple[Any, dict[str, Any]]:
    x = x.detach().clone().requires_grad_()
    o = layer(x)[0]
    o.backward(upstream.to(o.dtype))
    gradients = {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return o.detach(), {"dx": x.grad, **gradients}
