"""Writes config/schema.json and config/README.md, or the same two into the folder given."""

from __future__ import annotations

import sys
from pathlib import Path

from reproduction.config.documentation import reference, schema

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "config")
(folder / "schema.json").write_text(schema())
(folder / "README.md").write_text(reference())
