"""A model from the hub or from disk, taken into a run as it is."""

from __future__ import annotations

import os
from pathlib import Path

from reproduction.config import Config, Model
from statecut.errors import InputError
from statecut.files import atomic_write, read_json
from statecut.hub import resolve
from statecut.models.architectures import architecture
from statecut.models.architectures.base import need, text_config


def import_model(model: Model, tokenizer: Path | str, out: Path | str) -> None:
    """A folder of links to the model's files, with the tokenizer that the configuration names.

    A model of other sizes than the configuration's is refused: widths, and with them the whole
    plan of the run, follow from those.
    """
    if model.source.kind == "random":
        from statecut.models.checkpoint import create, save

        save(create(model.fla_config(), seed=0), out, tokenizer=tokenizer, force=True)
        return
    source = folder_of(model, verify=True)
    check_sizes(model, source)
    with atomic_write(out, force=True, folder=True) as aside:
        for file in model_files(source):
            (aside / file.name).symlink_to(os.path.relpath(file.resolve(), Path(out).resolve()))
        for file in Path(tokenizer).iterdir():
            (aside / file.name).write_bytes(file.read_bytes())


def folder_of(model: Model, *, verify: bool = False) -> Path:
    """Where a model that the run does not train is on this machine."""
    source = model.source
    if source.kind == "hub":
        return resolve("model", source.name, revision=source.revision, verify=verify)
    assert source.kind == "local"
    return Path(source.path)


def model_files(folder: Path) -> list[Path]:
    """What is taken of a model's folder: neither its tokenizer, nor a README or hidden files."""
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted(
        file
        for file in files
        if "token" not in file.name and file.suffix != ".md" and not file.name.startswith(".")
    )


def check_model_sizes(config: Config) -> None:
    """An error if a model that is here already is not the one that the configuration describes.

    Timings and the preflight are of the sizes in the configuration, and read no model: what they
    say would be of a model that is in no table.
    """
    for model in config.models.values():
        if model.source.kind in ("hub", "local"):
            try:
                folder = folder_of(model)
            except InputError:
                continue  # not here yet
            if (folder / "config.json").is_file():
                check_sizes(model, folder)


def check_sizes(model: Model, folder: Path) -> None:
    """An error unless the model in a folder is the one that the configuration describes."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model folder: it has no config.json")
    config = read_json(folder / "config.json")
    kind = architecture(config)
    # Multimodal ones may say in one place only that embeddings are tied.
    tied = config.get("tie_word_embeddings")
    shape, config = kind.shape(config), {**text_config(config)}
    if tied:
        config["tie_word_embeddings"] = tied
    compared = {
        "head_k_dim": (shape.width, model.head_k_dim),
        "head_v_dim": (shape.value_width, model.head_v_dim),
        "num_heads": (shape.heads, model.num_heads),
        "num_v_heads": (shape.value_heads, model.value_heads),
        "num_hidden_layers": (need(config, "num_hidden_layers"), model.num_hidden_layers),
        "hidden_size": (need(config, "hidden_size"), model.hidden_size),
        "vocab_size": (need(config, "vocab_size"), model.vocab_size),
    }
    # What neither states is fla's default for both. Timings are of the configuration's shape.
    stated = model.fla_config()
    for name in ("conv_size", "intermediate_size", "tie_word_embeddings", *kind.options):
        if None not in (config.get(name), stated.get(name)):
            compared[name] = (config[name], stated[name])
    for name, (theirs, ours) in compared.items():
        if theirs != ours:
            raise InputError(
                f"{folder} has {name} {theirs}, the configuration says {ours} for {model.label}: "
                "correct the configuration"
            )
