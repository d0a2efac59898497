"""What a run's selections and states say beside its tables, as Markdown.

    python benchmarks/findings.py results/lab

How many swaps DRRQR made and what gain they left; how evenly scores are spread over the channels of
a head; how far selections agree between seeds, samples, norms, methods, and between keys and
queries; whether keys lie on both sides of zero (of rotations, which an archive does not hold); and
how much of their memory states use.
"""

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from arguments import existing

from reproduction.analysis.rank import RankAnalysis
from statecut.arguments import width
from statecut.models.checkpoint import open_safetensors
from statecut.pruning.selection import Selection, load_selection

RATIOS = (0.75, 0.5, 0.4, 0.3)  # of the lab
SKIP = 128  # tokens before the state has filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=existing, help="the folder of a run")
    folder = parser.parse_args().results
    models = sorted({path.parent for path in (folder / "selections").glob("*/*.safetensors")})
    if not models:
        parser.error(f"{folder / 'selections'}: holds no model's selections; run the workflow")
    for model in models:
        chosen = dict(read(model))
        print(f"## {model.name}\n")
        print_rows(["swaps", "cut", "seeds", "swaps in all heads", "largest gain left"],
                   swaps(chosen))  # fmt: skip
        print_rows(["scores", "seeds", "of all, in the better half of a head, %",
                    "largest, in medians"], spread(chosen))  # fmt: skip
        print_rows(["the same channels", "cut", "of those kept, %", "by chance"], agreement(chosen))
        print_rows(["first axis of the keys", "cut", "seeds", "heads", "entries of one sign, %"],
                   signs(chosen))  # fmt: skip
    if (folder / "analyses").is_dir():
        print("## Rank utilization\n")
        print_rows(["states of", "seeds", "u", "effective rank", "of"], utilization(folder))


Key = tuple[str, str, float, int]  # method, target, ratio and seed
Chosen = dict[Key, Selection]


def read(folder: Path) -> Iterator[tuple[Key, Selection]]:
    for path in sorted(folder.glob("*.safetensors")):
        method, target, seed = path.stem.rsplit("-", 2)
        with open_safetensors(path) as file:
            about = json.loads(file.metadata()["about"])
        for ratio in RATIOS if target != "v" else ():
            keys = width(about["full_width"], ratio)
            yield (method, target, ratio, int(seed)), load_selection(path, keys=keys, values=0)


def swaps(chosen: Chosen) -> Iterator[list[str]]:
    tensors = defaultdict(list)
    for (method, target, ratio, _), selection in chosen.items():
        if "swaps" in selection.tensors and target == "kq":
            tensors[method, ratio].append(selection.tensors)
    for (method, ratio), seeds in sorted(tensors.items()):
        total = sum(int(seed["swaps"].sum()) for seed in seeds)
        left = max(float(seed["largest_gain"].max()) for seed in seeds)
        yield [method, f"{ratio:.0%}", f"{len(seeds)}", f"{total}", f"{left:.3f}"]


def spread(chosen: Chosen) -> Iterator[list[str]]:
    """The same at every ratio: the mean over heads of the share, their median of the largest."""
    found: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for (method, target, _, seed), selection in chosen.items():
        if "scores" in selection.tensors and target == "kq" and "seed" not in selection.about:
            found[method][seed] = selection.tensors["scores"].sort(-1, descending=True).values
    for method, seeds in found.items():
        scores = torch.cat([*seeds.values()])
        half = scores.shape[-1] // 2
        share = scores[..., :half].sum(-1) / scores.sum(-1)
        largest = scores[..., 0] / scores[..., half]
        yield [method, f"{len(seeds)}", f"{100 * share.mean():.0f}", f"{largest.median():.1f}"]


def agreement(chosen: Chosen) -> Iterator[list[str]]:
    """Pairs of selections with the same width: which part of their channels is the same."""
    pairs: dict[tuple[str, float], list[float]] = defaultdict(list)
    for a, b in itertools.combinations(chosen, 2):
        if a[2] == b[2] and (what := compared(a, b, chosen)):
            pairs[what, a[2]].append(same(chosen[a], chosen[b]))
    for (what, ratio), shares in sorted(pairs.items()):
        yield [what, f"{ratio:.0%}", f"{100 * fmean(shares):.0f}", f"{100 * (1 - ratio):.0f}"]


def compared(a: Key, b: Key, chosen: Chosen) -> str | None:
    """What a pair differs in, if that is one thing: of methods, DRRQR with any other that is not
    drawn, and those that do not pivot with each other."""
    if (a[0], a[1]) == (b[0], b[1]) and a[1] == "kq":
        return f"{a[0]}, two seeds"
    if (a[0], a[3]) == (b[0], b[3]) and {a[1], b[1]} == {"k", "q"}:
        return f"{a[0]}, by keys and by queries"
    names = sorted({a[0], b[0]})
    pair = [chosen[a], chosen[b]]
    comparable = all("kept" in s.tensors and "seed" not in s.about for s in pair)
    pivoted = any("swaps" in selection.tensors for selection in pair)
    alike = (a[1], a[3]) == (b[1], b[3]) == ("kq", 0) and len(names) == 2
    if alike and comparable and ("drrqr" in names or not pivoted):
        return " and ".join(names)
    return None


def same(one: Selection, other: Selection) -> float:
    a, b = one.tensors["kept"], other.tensors["kept"]
    return float((a[..., :, None] == b[..., None, :]).any(-1).double().mean())


def signs(chosen: Chosen) -> Iterator[list[str]]:
    """Behind a SiLU that bends, keys are mostly positive, and so is their strongest axis."""
    found = defaultdict(list)
    for (method, _, ratio, _), one in chosen.items():
        if method == "pca_proper" and "rotation" in one.tensors:
            positive = (one.tensors["rotation"][..., 0, :] > 0).double().mean(-1)
            found[ratio].append(100 * positive.maximum(1 - positive).flatten())
    for ratio, some in sorted(found.items()):
        every = torch.cat(some)
        said = f"{every.mean():.0f} ({every.min():.0f} to {every.max():.0f})"
        yield ["pca_proper", f"{ratio:.0%}", f"{len(some)}", f"{len(some[0])}", said]


def utilization(folder: Path) -> Iterator[list[str]]:
    """Mean over layers, heads and tokens."""
    found = defaultdict(list)
    for path in sorted((folder / "analyses").rglob("*.npz")):
        name = path.relative_to(folder / "analyses").with_suffix("").as_posix()
        found[without_seed(name)].append(RankAnalysis.load(path))
    for subject, some in found.items():
        used = [float(one.utilization[..., SKIP:].mean()) for one in some]
        rank = fmean(float(one.effective_rank[..., SKIP:].mean()) for one in some)
        spread = f" ({min(used):.3f} to {max(used):.3f})" if len(used) > 1 else ""
        yield [subject, f"{len(used)}", f"{fmean(used):.3f}{spread}", f"{rank:.1f}",
               f"{some[0].capacity}"]  # fmt: skip


def without_seed(subject: str) -> str:
    if subject.startswith("models/"):
        return subject
    return re.sub(r"-\d+((-matched)?(-refitted)?)$", r"\1", subject)


def print_rows(head: list[str], rows: Iterator[list[str]]) -> None:
    if some := list(rows):
        for row in (head, ["---"] * len(head), *some):
            print(f"| {' | '.join(row)} |")
        print()


if __name__ == "__main__":
    main()
