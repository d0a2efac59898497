"""Training steps of the demo's models on this CPU: tokens per second, median of five.

python benchmarks/cpu_training.py
"""

import statistics
import time
from pathlib import Path

import torch

from keycut.config import load_config
from keycut.models import create


def main() -> None:
    config = load_config(Path(__file__).parents[1] / "config" / "demo.yaml")
    for name, spec in config.models.items():
        recipe = config.recipes[spec.source.recipe]
        length = config.corpora[recipe.data.split("/")[0]].length
        model = create(spec.fla_config(), seed=0).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.randint(0, spec.vocab_size, (recipe.batch, length))
        rates = []
        for _ in range(6):
            started = time.perf_counter()
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            rates.append(ids.numel() / (time.perf_counter() - started))
        rates = rates[1:]  # the first allocates
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{name:16} {count:8,} parameters  {statistics.median(rates):8,.0f} tokens/s "
            f"({min(rates):,.0f} to {max(rates):,.0f}), {torch.get_num_threads()} threads"
        )


if __name__ == "__main__":
    main()
