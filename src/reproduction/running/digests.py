"""Digests of files that users bring: they may be large, and every start of Snakemake needs them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from statecut.files import read_json, sha256, write_json

logger = logging.getLogger(__name__)

CACHE = Path(".snakemake/statecut/digests.json")
ANNOUNCE_FROM = 5_000_000_000  # bytes that take long enough to read to be announced


def cached_sha256(paths: Iterable[Path | str], cache: Path = CACHE) -> dict[str, str]:
    """The digests of many files. Only those are read whose size or time changed since the last
    call: a touched or copied file is read once more, and has the same digest."""
    known = read_json(cache) if cache.is_file() else {}
    status = {str(path): os.stat(path) for path in paths}
    seen = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in status.items()}
    new = [path for path in seen if known.get(path, {}).get("seen") != seen[path]]
    if (size := sum(status[path].st_size for path in new)) > ANNOUNCE_FROM:
        logger.info(f"reading {len(new)} new or changed files, {size / 1e9:.1f} GB")
    try:
        for path in new:
            known[path] = {"seen": seen[path], "sha256": sha256(path)}
    finally:  # what was read before an interruption is kept
        if new:
            write_json(cache, known)
    return {path: str(known[path]["sha256"]) for path in seen}
