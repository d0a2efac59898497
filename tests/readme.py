"""What the README shows, for tests that try it."""

from pathlib import Path


def method_file() -> str:
    """The file under "Add a method"."""
    section = (Path(__file__).parents[1] / "README.md").read_text().split("## Add a method\n")[1]
    return section.split("```python\n")[1].split("```")[0]
