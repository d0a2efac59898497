"""Collect the tiles that runs on this machine's kind of GPU chose, for others with the same GPU.

    python benchmarks/tiles.py FOLDER [FOLDER ...] --out src/statecut/models/tuned

FOLDER is a Triton cache (TRITON_CACHE_DIR; of the workflow's runs, results/.triton). For each kind
of GPU one file is written; what is in it already stays, unless a folder has another choice.
"""

import argparse
from pathlib import Path

from arguments import existing

from statecut.files import read_json, write_json

VERSIONS = ("triton", "flash-linear-attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=existing, nargs="+", metavar="FOLDER")
    parser.add_argument("--out", type=existing, required=True, help="the folder of the files")
    options = parser.parse_args()
    kept = [path for folder in options.folders for path in folder.glob("tiles/*") if path.is_dir()]
    if not kept:
        parser.error("none of the folders has choices of tiles in it")
    for folder in kept:
        gpu, *numbers = folder.name.split("-")
        versions = dict(zip(VERSIONS, numbers, strict=True))
        out: Path = options.out / f"{gpu}.json"
        record = read_json(out) if out.is_file() else {}
        tiles = record.get("tiles", {}) if record.get("versions") == versions else {}
        choices = [read_json(path) for path in folder.glob("*.json")]
        for choice in choices:
            tiles.setdefault(choice["kernel"], {})[choice["widths"]] = choice["tile"]
        write_json(out, {"versions": versions, "tiles": tiles})
        total = sum(map(len, tiles.values()))
        print(f"{out}: {len(choices)} choices of {folder}, {total} in all, {len(tiles)} kernels")


if __name__ == "__main__":
    main()
