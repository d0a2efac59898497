"""The rules of the paper's run and the demo as a diagram in docs/workflow/run.md, as Snakemake
gives them: `make dag`.

Left out are the target `all`, and every arrow that follows from others: that pruning needs the
model, for instance, where it needs the calibration of it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/workflow/run.md"
BLOCK = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)


def rules(run: str) -> set[tuple[str, str]]:
    """Pairs of rules of a run, the second of which reads what the first writes."""
    text = subprocess.run(
        [Path(sys.executable).with_name("snakemake"), "--configfile", f"config/{run}.yaml",
         "--rulegraph", "mermaid-js", "--", "all"],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", text))
    pairs = {(names[a], names[b]) for a, b in re.findall(r"(id\d+) --> (id\d+)", text)}
    return {(a, b) for a, b in pairs if b != "all"}


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without the pairs that follow from others."""

    def follows(start: str, end: str) -> bool:
        return any((a, end) in pairs or follows(a, end) for s, a in pairs if s == start)

    return {(a, b) for a, b in pairs if not follows(a, b)}


def diagram() -> str:
    readers: dict[str, list[str]] = {}
    for rule, reader in sorted(reduced(rules("paper") | rules("demo"))):
        readers.setdefault(rule, []).append(reader)
    arrows = "".join(f"    {rule} --> {' & '.join(readers[rule])}\n" for rule in readers)
    return f"```mermaid\nflowchart LR\n{arrows}```\n"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(diagram(), PAGE.read_text()))
