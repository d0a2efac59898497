"""How far a sliced model is from the whole one with the same channels set to zero.

    python benchmarks/masking.py MODEL [MODEL ...]

The kernel divides by the root of the width, which the output norm takes out but for its eps: the
two are the same model if eps x width is the same in both. Compared in float32 at four ratios, L1's
channels: with that eps, and with the one of the config in both, as any code does that slices. The
text is the prose of the installed Python packages; the figures are the largest difference of a
logit over the largest logit, and the root mean square of all differences over that of the logits.
"""

import argparse
from itertools import islice

import torch
from arguments import existing

from keycut.config import width
from keycut.data.documentation import documentation
from keycut.data.tokenizer import load_tokenizer
from keycut.models.checkpoint import Checkpoint, load
from keycut.selection.select import select
from keycut.selection.statistics import ModelStatistics
from keycut.slicing import Pad, padded_eps
from keycut.training.recovery import resize_model, scale_eps

RATIOS = (0.3, 0.4, 0.5, 0.75)
SEQUENCES, LENGTH = 32, 128


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", type=existing, nargs="+", metavar="MODEL")
    print("                         equal eps x width     the config's eps")
    print("model               kept   largest       rms   largest       rms", flush=True)
    text = list(islice(documentation(), 200))
    for folder in parser.parse_args().models:
        checkpoint = Checkpoint(folder)
        ids = torch.from_numpy(load_tokenizer(folder).encode("\n".join(text)))
        ids = ids[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)
        whole = load(folder, dtype=torch.float32)
        full = checkpoint.shape.width
        for selection in select(
            "l1", ModelStatistics(checkpoint), [width(full, r) for r in RATIOS]
        ):
            kept = selection.width
            sliced = resize_model(whole, selection.change()).eval()
            # The order of channels is of no account, so zeros may stand at the end.
            masked = resize_model(sliced, Pad(full)).eval()
            expected = sliced(ids).logits
            as_is = masked(ids).logits
            scale_eps(masked, padded_eps(1.0, kept, full))
            line = f"{folder.name:18} {kept:5}"
            for logits in (masked(ids).logits, as_is):
                error = logits - expected
                line += f"  {error.abs().max() / expected.abs().max():8.1e}"
                line += f"  {error.norm() / expected.norm():8.1e}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
