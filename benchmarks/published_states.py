"""What published models keep per request, and what half of their key channels would save.

    python benchmarks/published_states.py

published_configs.json has what their config.json says of caches, from public copies of the files
(November 2026). `statecut inspect config.json` says the same of any other. Where keys and values
have one width, both are cut.
"""

import json
import tempfile
from pathlib import Path

import statecut
from statecut.serving.inspection import size

CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def table():
    yield (
        "| model | layers with a state, and with softmax | value heads x d_k x d_v "
        "| state and filters | softmax cache at 4,096 tokens | `--ratio 0.5` leaves | saves |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, config in CONFIGS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            found = statecut.inspect(file.name)
        whole, half = found.cuts[0], next(cut for cut in found.cuts if cut.ratio == 0.5)
        values = half.width if found.square else found.value_width
        cells = (
            name,
            f"{found.delta_layers} + {found.softmax_layers}",
            f"{found.value_heads} x {found.key_width} x {found.value_width}",
            size(whole.state_bytes),
            size(found.softmax_bytes[0]),
            f"{half.width} x {values}",
            f"{size(whole.state_bytes - half.state_bytes)}, {half.saved[0]:.0%} of all",
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
