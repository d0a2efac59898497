"""What the documents show, for tests that try it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


def method_file() -> str:
    """The file under "Add a method"."""
    return python_blocks("README.md")[-1]
