"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keycut.plan.costs import FILE, Missing
from keycut.plan.planning import Plan, RulePlan, by_rule
from keycut.plan.schedule import Capacity

UNKNOWN = "not measured"


def duration(seconds: float) -> str:
    for most, unit, size in ((90, "s", 1), (90 * 60, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < most:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 86400)} d"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{_digits(count)} {unit}"
        count /= 1000
    return f"{_digits(count)} TB"


def _digits(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:,.0f}"


def at_least(text: str, complete: bool) -> str:
    return text if complete else f">= {text}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def to_text(plan: Plan) -> str:
    head = f"{plan.run}: {' '.join(plan.targets) or 'everything'}, {plan.jobs:,} jobs"
    head += f", {plan.to_run:,} still to run"
    if plan.executor != "local":
        head += f", {plan.submitted:,} of them by {plan.executor}"
    lines = [head, ""]
    rows = [["rule", "jobs", "to run", "GPUs", "longest", "all of them", "GPU hours", "disk"]]
    rows += [_row(rule) for rule in plan.rules]
    on_gpus = any(rule.gpus for rule in plan.rules)
    rows.append(
        [
            "total",
            f"{plan.jobs:,}",
            f"{plan.to_run:,}",
            "",
            "",
            _time(plan.seconds, plan.complete),
            _hours(plan.gpu_seconds, plan.complete) if on_gpus else "",
            size(plan.disk),
        ]
    )
    lines += [*table(rows), "", *_walls(plan), *_limits(plan), *_disk(plan)]
    if plan.measured:
        found = dict.fromkeys((measured.machine, measured.command) for measured in plan.measured)
        lines += ["", *(f"measured on {on}: {command}" for on, command in found)]
    if plan.missing:
        lines += ["", f"{UNKNOWN}, so times are at least these; add figures to {FILE}:"]
        lines += [f"  {line}" for line in missing_lines(plan.missing)]
    return "\n".join(lines) + "\n"


def _row(rule: RulePlan) -> list[str]:
    known = rule.to_run > 0
    return [
        rule.rule,
        f"{rule.jobs:,}",
        f"{rule.to_run:,}",
        f"{rule.gpus:g}" if rule.gpus else "",
        _time(rule.longest, rule.complete) if known else "",
        _time(rule.seconds, rule.complete) if known else "",
        _hours(rule.gpu_seconds, rule.complete) if known and rule.gpus else "",
        size(rule.disk) if rule.disk else "",
    ]


def _time(seconds: float, complete: bool) -> str:
    return at_least(duration(seconds), complete) if seconds or complete else UNKNOWN


def _hours(seconds: float, complete: bool) -> str:
    return at_least(_digits(seconds / 3600), complete) if seconds or complete else UNKNOWN


def _walls(plan: Plan) -> list[str]:
    if not plan.to_run:
        return ["nothing is left to run"]
    if not plan.seconds and not plan.complete:
        return [f"wall time  {UNKNOWN}"]
    rows = [["wall time", _named(wall.capacity), _time(wall.seconds, plan.complete)]
            for wall in plan.walls]  # fmt: skip
    rows.append(["", "without a limit", _time(plan.critical_path, plan.complete)])
    return table([rows[0], *(["", *row[1:]] for row in rows[1:])])


def _named(capacity: Capacity) -> str:
    parts = [
        f"{most:g} {name}{'s' if most > 1 else ''}"
        for most, name in ((capacity.gpus, "GPU"), (capacity.cores, "core"), (capacity.jobs, "job"))
        if most is not None
    ]
    return ", ".join(parts) or "without a limit"


def _limits(plan: Plan) -> list[str]:
    """Jobs that end at their time limit and go on in the next attempt."""
    lines = []
    for rule in plan.rules:
        if rule.attempts > 1 and rule.limit_s is not None:
            line = (
                f"{rule.rule}: its longest job takes {duration(rule.longest)}, its limit is "
                f"{duration(rule.limit_s)}: {rule.attempts} attempts"
            )
            if rule.attempts > plan.retries + 1:
                line += f", of which the profile allows {plan.retries + 1}"
            lines.append(line)
    return lines


def _disk(plan: Plan) -> list[str]:
    lines = [
        f"while a job of {rule.rule} runs, its checkpoints take up to {size(rule.scratch)} more"
        for rule in plan.rules
        if rule.scratch and rule.to_run
    ]
    return ["disk is of all jobs, done or not; sliced models are kept; results and logs are small "
            "and not counted", *lines]  # fmt: skip


def missing_lines(missing: Iterable[Missing]) -> list[str]:
    """What is missing, a line for each rule: of what, and for which models."""
    lines = []
    for work, members in by_rule(missing, lambda one: one.work).items():
        of = ", ".join(dict.fromkeys(one.of for one in members if one.of))
        models = ", ".join(
            dict.fromkeys(
                " ".join([one.kernel or "", parameters(one.parameters)]).strip()
                for one in members
                if one.kernel or one.parameters
            )
        )
        lines.append(f"{work}{f': {of}' if of else ''}{f' ({models})' if models else ''}")
    return lines


def parameters(count: int | None) -> str:
    if count is None:
        return ""
    millions = float(f"{count:.2g}") / 1e6
    return f"{millions / 1000:g}B" if millions >= 1000 else f"{millions:g}M"
