"""How many swaps DRRQR makes on a trained model, and what they change against plain pivoting.

    python benchmarks/swaps.py MODEL --text FILE [--sequences 64] [--length 128]

One calibration; then for every tolerance f, sample or all tokens, raw or normalised activations
and four ratios: swaps in all heads, heads with any, channels kept that column pivoting does not
keep (of all kept), the largest gain left, and the mean gain in log-volume.
"""

import argparse

from arguments import existing

import statecut
from statecut import logs
from statecut.arguments import width
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.select import select
from statecut.pruning.statistics import ModelStatistics

RATIOS = (0.3, 0.4, 0.5, 0.75)


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=existing)
    parser.add_argument("--text", type=existing, required=True)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()

    checkpoint = Checkpoint(options.model)
    sizes = {"sequences": options.sequences, "length": options.length}
    tokens = statecut.tokenize(options.text, options.model, **sizes)
    calibration = statecut.calibrate(options.model, tokens, gradients=False)
    model = ModelStatistics(checkpoint, calibration)
    shape = checkpoint.shape
    widths = [width(shape.width, ratio) for ratio in RATIOS]
    heads = len(shape.layers) * shape.heads
    print(f"{options.model.name}: {heads} heads of {shape.width} channels")
    print("rows    activations  f     kept  swaps  heads  changed     gain left  log-volume")
    for rows in ("sample", "all"):
        for activations in ("raw", "normalised"):
            given = {"rows": rows, "activations": activations}
            plain = select("qrcp", model, widths, **given)
            for f in (1.5, 1.1, 1.0):
                swapped = select("drrqr", model, widths, f=f, **given)
                for strong, start in zip(swapped, plain, strict=True):
                    report(rows, activations, f, strong.tensors, start.tensors)


def report(rows, activations, f, strong, start) -> None:
    kept = strong["kept"]
    same = (kept[..., :, None] == start["kept"][..., None, :]).any(-1)
    more = strong["log_volume"] - start["log_volume"]
    print(
        f"{rows:7} {activations:12} {f:<4} {kept.shape[-1]:5} {int(strong['swaps'].sum()):6} "
        f"{int((strong['swaps'] > 0).sum()):6} {int((~same).sum()):4} of {kept.numel():4} "
        f"{strong['largest_gain'].max():10.3f}  {more.mean():+.3f}"
    )


if __name__ == "__main__":
    main()
