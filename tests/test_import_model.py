"""Models that are taken as they are: the ones that the configuration describes, or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from reproduction.cli import main
from reproduction.config import Model, load_config
from reproduction.config.sources import FromDisk, RandomWeights
from reproduction.import_model import check_sizes, import_model, model_files
from reproduction.rules import files_of
from statecut.errors import InputError
from statecut.files import read_json, write_json
from statecut.models.checkpoint import create, load, save

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "config" / "demo.yaml"


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
    import_model(there, tmp_path / "tokenizer", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    assert load(tmp_path / "out").config.hidden_size == there.hidden_size


@pytest.mark.parametrize("name", ["gated_deltanet", "hybrid"])
def test_a_rehearsal_makes_a_model_with_random_weights(
    there: Model, tmp_path: Path, name: str
) -> None:
    described = load_config(DEMO).models[name]
    model = described.model_copy(update={"source": RandomWeights(kind="random")})
    import_model(model, tmp_path / "tokenizer", tmp_path / "out")
    check_sizes(model, tmp_path / "out")
    assert load(tmp_path / "out").num_parameters() == model.parameters


def test_what_is_not_taken_of_a_folder_does_not_count(there: Model, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    before = files_of(str(folder), model_files)
    for name in (".git/index", ".cache/some", "README.md", ".gitattributes", "tokenizer.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("other")
    assert files_of(str(folder), model_files) == before
    import_model(there, tmp_path / "tokenizer", tmp_path / "out")
    linked = {path.name for path in (tmp_path / "out").iterdir() if path.is_symlink()}
    assert {Path(path).name for path in before} == linked


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
        import_model(there, tmp_path / "tokenizer", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_contradicts_a_model_that_is_here_stops_check_and_timings(
    there: Model, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load(DEMO.read_text())
    data["models"]["gated_deltanet"] |= {"source": there.source.model_dump(), "conv_size": 3}
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(data))
    words = "conv_size 4, the configuration says 3 for Gated DeltaNet"
    assert main(["check", str(file)]) == 2
    assert words in capfd.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--configfile", file, "--directory", tmp_path,
         "-s", ROOT / "workflow" / "Snakefile", "results/demo/measurements"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1
    assert words in done.stdout + done.stderr


@pytest.mark.parametrize("tied", [True, False])
def test_a_multimodal_config_may_say_in_one_place_that_embeddings_are_tied(
    tmp_path: Path, tied: bool
) -> None:
    model = load_config(DEMO).models["hybrid"]
    text = {**model.fla_config(), "tie_word_embeddings": False}
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": tied}
    write_json(tmp_path / "config.json", config)
    if tied:
        check_sizes(model, tmp_path)
    else:
        with pytest.raises(InputError, match="has tie_word_embeddings False, the configuration"):
            check_sizes(model, tmp_path)
