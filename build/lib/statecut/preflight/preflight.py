"""Whether a delta rule can be trained in a shape, on the machine at hand.

Kernels are compiled for the number of heads and the widths of keys and values, and whether the
compiler gets them right depends on all of these: 32 key channels train in one model and crash in
another. So a verdict holds for one shape.

Each shape is examined in a process of its own (`examination`). Keys whose width does not train are
padded with zeros to the next one that does (`statecut.pruning.slicing.Pad`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from reproduction.config import Preflight
from statecut.errors import InputError, nearest
from statecut.files import check_writable, read_json, write_json
from statecut.models.architectures import RULES
from statecut.models.shapes import Shape
from statecut.preflight.process import Outcome, own_process_by_default, run_work

WIDEST = 256
"""The kernels take no wider keys."""

LIMIT_S = 900.0
LAYER_TOLERANCE = 5  # times that of the rule: a layer adds bf16 projections, filters and norms

Word = Literal["trains", "infers only", "crashes"]
Errors = dict[str, float]


@dataclass(frozen=True)
class ShapeVerdict:
    """Whether a shape trains, only infers, or crashes, with the relative errors of its parts."""

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
    def trainable(self) -> bool:
        return self.trains or self.padded_to is not None


def check_shape(
    shape: Shape,
    settings: Preflight,
    out: Path | str,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    own_process: bool | None = None,
) -> ShapeVerdict:
    """Check one shape, and those to pad it to if need be, and write the verdict as JSON."""
    validate_shape(shape)
    check_writable(out)
    (verdict,) = check_shapes(
        [shape], settings, device=device, limit_s=limit_s, own_process=own_process
    )
    write_json(out, asdict(verdict))
    return verdict


def read(path: Path | str) -> ShapeVerdict:
    """What `check_shape` wrote."""
    record = read_json(path)
    try:
        return from_json(record)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a preflight of Statecut ({error!r})") from None


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
    if not (verdict.trainable if may_pad else verdict.trains):
        raise InputError(f"{path}: {verdict.shape.name} cannot be trained here: {verdict.reason}")
    return verdict.padded_to


def from_json(record: dict[str, Any]) -> ShapeVerdict:
    return ShapeVerdict(**record | {"shape": Shape(**record["shape"])})


def check_shapes(
    shapes: Sequence[Shape],
    settings: Preflight,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    jobs: int = 1,
    own_process: bool | None = None,
) -> Iterator[ShapeVerdict]:
    """A verdict for each, `jobs` at a time, as soon as it is known. Shapes that failed share what
    is found out about those to pad them to."""
    for shape in shapes:
        validate_shape(shape)
    own_process = own_process_by_default() if own_process is None else own_process
    known: dict[Shape, ShapeVerdict] = {}

    def examine_new(wanted: Sequence[Shape]) -> Iterator[ShapeVerdict]:
        new = [shape for shape in dict.fromkeys(wanted) if shape not in known]
        # Threads of one process would share a random state.
        with ThreadPoolExecutor(jobs if own_process else 1) as pool:
            options = (settings, limit_s, own_process, device)
            for future in as_completed([pool.submit(_examine, s, *options) for s in new]):
                verdict = future.result()
                known[verdict.shape] = verdict
                yield verdict

    for verdict in examine_new(shapes):
        if verdict.trains:
            yield verdict
    candidates = {shape: wider(shape) for shape in shapes if not known[shape].trains}
    while candidates:
        for _ in examine_new([rest[0] for rest in candidates.values() if rest]):
            pass
        for shape, rest in list(candidates.items()):
            if rest and not known[rest[0]].trains:
                candidates[shape] = rest[1:]
                continue
            del candidates[shape]
            yield replace(known[shape], padded_to=rest[0].width if rest else None)


def wider(shape: Shape) -> list[Shape]:
    """Shapes to pad to, the narrowest first: kernels work in powers of two anyway."""
    powers = (2**i for i in range(4, 9))
    return [replace(shape, width=power) for power in powers if power > shape.width]


def validate_shape(shape: Shape) -> None:
    if shape.kernel not in RULES:
        raise InputError(f"kernel {shape.kernel!r} does not exist{nearest(shape.kernel, RULES)}")
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


def _examine(
    shape: Shape, settings: Preflight, limit_s: float, own_process: bool, device: str | None
) -> ShapeVerdict:
    from statecut.preflight.examination import examine

    outcome = run_work(
        examine, shape, settings.length, device, limit_s=limit_s, own_process=own_process
    )
    return judge(shape, settings.tolerance, outcome)


def judge(shape: Shape, tolerance: float, outcome: Outcome) -> ShapeVerdict:
    """The verdict that follows from what a process yielded before it ended."""
    parts = dict(outcome.values)
    forward = parts.get("forward")
    verdict = ShapeVerdict(
        shape,
        "trains",
        errors={**(forward or {}), **parts.get("backward", {})},
        tiles=parts.get("tiles", {}),
        layer={**parts.get("layer_forward", {}), **parts.get("layer_backward", {})},
        tolerance=tolerance,
        machine=parts.get("machine", {}),
        seconds=outcome.seconds,
    )
    limits = {"forward": 1, "backward": 1, "tiles": 1, "layer_forward": LAYER_TOLERANCE,
              "layer_backward": LAYER_TOLERANCE}  # fmt: skip
    wrong = [
        f"{part.replace('_', ' ')}: {name} is off by {error:.2g}"
        for part, limit in limits.items()
        for name, error in parts.get(part, {}).items()
        if not error <= limit * tolerance
    ]
    if not outcome.reason and not wrong:
        return verdict
    reason = "; ".join([*([outcome.reason] if outcome.reason else []), *wrong])
    infers = forward is not None and all(error <= tolerance for error in forward.values())
    return replace(verdict, verdict="infers only" if infers else "crashes", reason=reason)


# --- the command ---

TABLE_HEAD = (
    f"{'kernel':14} {'keys':>7} {'values':>7}  {'verdict':11}  {'pad to':>6}  {'rule':>7} "
    f"{'tiles':>7} {'layer':>7}  {'time':>5}"
)


def table_row(verdict: ShapeVerdict) -> str:
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


def requested_shapes(
    *,
    configfile: Path | None,
    kernel: Any,
    widths: str | None,
    heads: int | None,
    value_heads: int | None,
    value_width: int | None,
) -> tuple[list[Shape], Preflight]:
    """All shapes that a configuration trains, or those of one kernel with some widths; heads and
    values as published models have them unless they are given."""
    from reproduction.config import load_config
    from reproduction.running.import_model import check_model_sizes

    if (configfile is None) == (kernel is None):
        raise InputError("give either --configfile, or --kernel and --widths")
    if configfile is not None:
        config = load_config(configfile)
        check_model_sizes(config)
        return list(config.trained_shapes()), config.preflight
    numbers = (widths or "").split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise InputError(f"--widths {widths or 'missing'}: give whole numbers, as in 128,64,32")
    rule = RULES.get(kernel)
    published = (rule.heads, rule.value_width) if rule else (1, 1)
    heads = published[0] if heads is None else heads
    value_heads = heads if value_heads is None else value_heads
    value_width = published[1] if value_width is None else value_width
    shapes = dict.fromkeys(Shape(kernel, heads, int(n), value_heads, value_width) for n in numbers)
    for shape in shapes:
        validate_shape(shape)
    return list(shapes), Preflight(length=256, tolerance=0.01)
