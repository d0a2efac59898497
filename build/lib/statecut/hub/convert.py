"""Pickled weights to safetensors, without running any code that a pickle may hold."""

from __future__ import annotations

import re
from pathlib import Path

from statecut.errors import InputError
from statecut.files import read_json, write_json


def safe_name(path: str) -> str:
    """The name of a pickled weights file, or of its index, after conversion; others keep theirs."""
    match = re.fullmatch(r"pytorch_model(.*)\.bin(\.index\.json)?", path)
    return f"model{match[1]}.safetensors{match[2] or ''}" if match else path


def convert(pickled: Path, out: Path) -> None:
    (_convert_index if out.suffix == ".json" else _convert_weights)(pickled, out)


def _convert_weights(pickled: Path, out: Path) -> None:
    """The file is mapped, not read, so that a large shard needs little memory."""
    import pickle
    import zipfile

    import torch
    from safetensors.torch import save_file

    try:
        state = torch.load(
            pickled, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(pickled)
        )
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise InputError(
            f"{pickled.name} is refused: it is no pickle of tensors alone"
            f"{f' (it calls for {name[1]})' if name else ''}, and reading it could run code"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{pickled.name} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and not tensor.is_sparse
        for name, tensor in state.items()
    ):
        raise InputError(f"{pickled.name} is not a plain table of names and dense tensors")
    tensors, storages = {}, set()
    for name, tensor in state.items():
        # safetensors refuses shared memory. Tied weights become two equal copies, so that no name
        # is lost: only the model's class knows which of them it wants.
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().contiguous()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    save_file(tensors, out, metadata={"format": "pt"})


def _convert_index(pickled: Path, out: Path) -> None:
    index = read_json(pickled)
    try:
        shards = {name: safe_name(shard) for name, shard in index["weight_map"].items()}
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{pickled.name} is not an index of sharded weights") from None
    write_json(out, {**index, "weight_map": shards})
