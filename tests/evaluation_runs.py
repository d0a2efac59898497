"""A model with words, and a configuration with one suite, for tests of evaluation."""

import json
from pathlib import Path

import yaml
from small_models import COMMON, SMALL

from reproduction.config import parse_config
from reproduction.new_tokenizers import train_tokenizer
from statecut.models.checkpoint import create, save

SENTENCE = """
the state of a linear model keeps what it reads and forgets some keys when values
overlap so a wide key helps recall while narrow heads run faster on every machine
"""
WORDS = SENTENCE.split()

TEXT = "\n".join(
    " ".join(WORDS[(i * i + 3 * j) % len(WORDS)] for j in range(40)) + " ." for i in range(60)
)


def make_model(folder: Path, name: str = "delta_net") -> Path:
    """A random model of a small architecture, with a tokenizer of 300 pieces."""
    train_tokenizer([TEXT], folder / "tokenizer", vocabulary_size=300)
    # Half of the usual spread, so that perplexities stay numbers that one can compare.
    config = {
        **SMALL[name],
        "vocab_size": 300,
        "initializer_range": COMMON["initializer_range"] / 2,
    }
    save(create(config, seed=1), folder / "model", tokenizer=folder / "tokenizer")
    return folder / "model"


def demo_data() -> dict:
    return yaml.safe_load((Path(__file__).parents[1] / "config" / "demo.yaml").read_text())


def run_config(suite: dict):
    """The demo, its suites aside and this one, `suite`, in their place."""
    data = demo_data()
    data["tables"], data["figures"] = {}, {}
    data["evaluation"] = {"protocol": "test", "suites": {"suite": {"label": "S", **suite}}}
    return parse_config(data, "test.yaml")


def column(task: str, metric: str, file: Path | None = None, version: int = 1, **more) -> dict:
    stated = {"label": f"{task} {metric}", "task": task, "metric": metric, "version": version}
    return {**stated, **more} if file is None else {**stated, **more, "file": str(file)}


def write_lines(path: Path, documents: list[dict]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path
