"""What the benchmarks' arguments have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def existing(text: str) -> Path:
    """A file or folder that is read: looked for before any work starts."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return Path(text)
