"""Models that are taken as they are: the ones that the configuration describes, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from keycut.artefact import read_json, write_json
from keycut.config import Model, load_config
from keycut.config.sources import FromDisk
from keycut.errors import InputError
from keycut.hub import DOWNLOADS, LOCK
from keycut.models import create, load, save
from keycut.models.adoption import adopt as adopted

DEMO = Path(__file__).parents[1] / "config" / "demo.yaml"


def adopt(model: Model, tokenizer: Path, out: Path) -> None:
    adopted(model, tokenizer, out, downloads=DOWNLOADS, lock=LOCK)


@pytest.fixture(scope="module")
def described() -> Model:
    return load_config(DEMO).models["gated_deltanet"]


@pytest.fixture
def there(described: Model, tmp_path: Path) -> Model:
    """The same model, in a folder."""
    folder = tmp_path / "mine"
    save(create(described.fla_config(), seed=0), folder)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return described.model_copy(update={"source": FromDisk(kind="local", path=str(folder))})


def test_a_model_is_linked_with_the_tokenizer_of_the_run(there: Model, tmp_path: Path) -> None:
    (tmp_path / "mine" / "tokenizer_config.json").write_text("another")
    adopt(there, tmp_path / "tokenizer", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    assert load(tmp_path / "out").config.hidden_size == there.hidden_size


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 80), ("conv_size", 3), ("intermediate_size", 64), ("use_gate", False),
     ("tie_word_embeddings", False)],
)  # fmt: skip
def test_another_model_than_was_described_is_refused(
    there: Model, tmp_path: Path, name: str, value: object
) -> None:
    config = tmp_path / "mine" / "config.json"
    found = read_json(config)
    assert found[name] != value
    write_json(config, {**found, name: value})
    with pytest.raises(InputError, match=f"{name} {value}, the configuration says {found[name]}"):
        adopt(there, tmp_path / "tokenizer", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_the_run_trains_is_not_adopted(described: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is trained by this run"):
        adopt(described, tmp_path, tmp_path / "out")
