"""Models on disk: opened, loaded without anything left to chance, rewritten, saved whole."""

from __future__ import annotations

import logging
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from statecut.errors import InputError
from statecut.files import atomic_write, digest, read_json, sha256, to_json
from statecut.hub import model_folder
from statecut.models.architectures import ARCHITECTURES, architecture
from statecut.models.architectures.base import Architecture, Config, MixerShape, depth
from statecut.models.description import INDEX, WEIGHTS, ModelFolder, open_safetensors

logger = logging.getLogger(__name__)

ANNOUNCE_FROM = 1_000_000_000  # bytes of a file that is announced before it is read
# The tokenizer and what else goes with a model whatever its widths.
COMPANIONS = """tokenizer* special_tokens_map.json vocab.json merges.txt added_tokens.json
    chat_template* generation_config.json *processor_config.json *.model"""

# What wrappers put before a name, one around another: data parallel training, peft. torch.compile
# puts its own before the name of any part that it compiled.
WRAPPERS, COMPILED = r"^(module\.|base_model\.model\.)+", "_orig_mod."
# Norms that older flash-linear-attention called attn.norm and mlp.norm.
OLDER_NORMS = r"^(model\.layers\.\d+\.)(attn|mlp)\.norm\.weight$", r"\1\2_norm.weight"

Tensors = Iterator[tuple[str, torch.Tensor]]


def read_tensors(path: Path, names: Container[str] | None = None) -> Tensors:
    """The tensors of a safetensors file, all or those named, one after the other."""
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if names is None or name in names:
                yield name, file.get_tensor(name)


class Checkpoint(ModelFolder):
    """A model folder, whose tensors are read one by one."""

    def tensors(self, names: Iterable[str] | None = None) -> Tensors:
        """Those named, or all, file by file."""
        wanted = set(self.files if names is None else names)
        if absent := sorted(wanted - set(self.files)):
            raise InputError(f"{self.folder}: no tensor named {', '.join(absent)}")
        for shard in self.shards():
            of_shard = {name for name in wanted if self.files[name] == shard}
            yield from read_tensors(self.folder / shard, of_shard)

    def tensor(self, name: str) -> torch.Tensor:
        return next(self.tensors([name]))[1]

    def shards(self) -> list[str]:
        return sorted(set(self.files.values()))

    def headers(self) -> Tensors:
        """Every tensor with its shape and type and without its numbers, which are not read."""
        return iter(self._headers.items())

    @cached_property
    def _headers(self) -> dict[str, torch.Tensor]:
        # Mapped, not read: no number of it is looked at.
        return {name: tensor.to("meta") for name, tensor in self.tensors()}

    @property
    def dtype(self) -> str:
        """What its config says its weights are in."""
        configs = (self.config, self.text_config)
        keys = ("dtype", "torch_dtype")  # transformers' name, and the one before 5
        return next((str(c[key]) for c in configs for key in keys if c.get(key)), "float32")

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        """What it is run in: bf16 on a GPU, as DeltaNet's kernel takes nothing wider; on a CPU
        float32 if not float64, as many CPUs compute 16 bits hundreds of times slower."""
        if torch.device(device).type == "cuda":
            return torch.bfloat16
        return torch.float64 if self.dtype == "float64" else torch.float32

    @cached_property
    def passthrough(self) -> list[str]:
        """The tensors in its files that are no part of the text model."""
        return [
            stored
            for current, stored in self.stored.items()
            if current.startswith(self.passthrough_prefixes)
        ]

    @cached_property
    def stored(self) -> dict[str, str]:
        """How the files call each tensor, by its current name."""
        names = ((current_name(name, self.architecture), name) for name in self.files)
        return {current: name for current, name in names if current}

    def digest(self) -> str:
        """What the model is: its config and the bytes of its weights, read once in a process."""
        files = {name: (self.folder / name).absolute() for name in self.shards()}
        weights = {name: _sha256(path, path.stat().st_mtime_ns) for name, path in files.items()}
        return digest({"config": self.config, "weights": weights})


@cache
def _sha256(path: Path, changed: int) -> str:
    if (size := path.stat().st_size) >= ANNOUNCE_FROM:
        logger.info("digest: reading %s, %.1f GB", path.name, size / 1e9)
    return sha256(path)


def clean_name(name: str) -> str:
    """Without what wrappers and older libraries made of it."""
    return re.sub(*OLDER_NORMS, re.sub(WRAPPERS, "", name.replace(COMPILED, "")))


def current_name(name: str, kind: Architecture) -> str | None:
    """What a tensor is called in memory, or None for one that no forward pass used."""
    name = clean_name(name)
    if name.startswith(kind.text_model):
        name = "model." + name.removeprefix(kind.text_model)
    for stored, current in kind.renamed:
        name = re.sub(stored, current, name)
    mixer = re.escape(kind.mixer).replace(r"\{layer\}", r"\d+")
    match = re.fullmatch(f"{mixer}(.+)", name)
    return None if match and match[1] in kind.unused else name


def rename(
    tensors: Tensors, headers: dict[str, torch.Tensor], kind: Architecture
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Tensors of a model that has these, by their names in files, cleaned, and their current ones;
    the MLP's gate and up matrices, once joined, apart."""
    shapes = {current_name(name, kind): header.shape for name, header in headers.items()}
    for stored, tensor in tensors:
        if name := current_name(stored, kind):
            up, down = (name.replace(".mlp.gate_", f".mlp.{part}_") for part in ("up", "down"))
            clean = clean_name(stored)
            if up not in shapes and down in shapes and len(tensor) == 2 * shapes[down][1]:
                for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    file, memory = (n.replace(".mlp.gate_", f".mlp.{part}_") for n in (clean, name))
                    yield file, memory, half.clone()
            else:
                yield clean, name, tensor


def with_current_names(tensors: Tensors, kind: Architecture) -> dict[str, torch.Tensor]:
    stored = dict(tensors)
    return {name: tensor for _, name, tensor in rename(iter(stored.items()), stored, kind)}


def in_memory(tensors: Tensors, kind: Architecture) -> dict[str, torch.Tensor]:
    """The text model's tensors as files have them, to those of the model in memory."""
    return kind.joined(with_current_names(tensors, kind))


def _auto_classes(kind: Architecture) -> tuple[Any, Any]:
    """transformers' Auto classes, with an architecture registered and runnable."""
    from statecut.models import kernels
    from statecut.models.fixes.transformers import split_olmo_filters_by_width

    kernels.prepare(kind)
    kind.register()
    split_olmo_filters_by_width()
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar for every file, in logs that nobody watches
    return AutoConfig, AutoModelForCausalLM


def unfilled(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Any:
    """The text model of a folder's config without memory for its parameters."""
    auto_config, _ = _auto_classes(checkpoint.architecture)
    whole = auto_config.from_pretrained(checkpoint.folder, trust_remote_code=False)
    config = whole.get_text_config()
    # A multimodal config may name it in one place only.
    config.tie_word_embeddings = whole.tie_word_embeddings or config.tie_word_embeddings
    return without_parameters(config, device)


def without_parameters(config: Any, device: torch.device | str = "cpu") -> Any:
    """A model without memory for its parameters. What is computed from its config alone is on the
    device."""
    _, auto_model = _auto_classes(ARCHITECTURES[config.model_type])
    with torch.device("meta"):
        model = auto_model.from_config(config, trust_remote_code=False)
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # rotary angles, which no file holds
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    return model


def fill(model: Any, tensors: dict[str, torch.Tensor], where: Path | str) -> None:
    """Put tensors in the places of a model's parameters; an error that names those that are
    missing, unexpected or of another shape. Copies of others come from these."""
    tied = tied_weights(model).items()
    tensors |= {name: tensors[original] for name, original in tied if original in tensors}
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise InputError(f"{where}: {textwrap.shorten(str(error), 1000)}") from None


def tied_weights(model: Any) -> dict[str, str]:
    """Parameters that are copies of others, by name."""
    return dict(model.all_tied_weights_keys) if model.config.tie_word_embeddings else {}


def check_parameters(checkpoint: Checkpoint) -> tuple[int, list[str]]:
    """How many parameters a model has, and the tensors in its files that `load` ignores.

    Names and shapes come from the headers of the files; what `load` would refuse is refused.
    """
    model, kind = unfilled(checkpoint), checkpoint.architecture
    unused = {None, *tied_weights(model)}
    stored = {name: t for name, t in checkpoint.headers() if name not in checkpoint.passthrough}
    tensors = in_memory(iter(stored.items()), kind)
    numbers = {name: t.numel() for name, t in tensors.items() if t.is_floating_point()}
    count = sum(count for name, count in numbers.items() if name not in unused)
    fill(model, tensors, checkpoint.folder)
    ignored = [name for name in stored if current_name(name, kind) in unused]
    return count, [*ignored, *checkpoint.passthrough]


def describe(folder: Path) -> str:
    """Layers, heads and parameters of a model; an error if its weights do not fit its class. Of
    weights only the headers are read."""
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in ARCHITECTURES:
        return f"model_type {model_type!r} is none that Statecut knows: only its hashes are checked"
    checkpoint = Checkpoint(folder)
    shape = checkpoint.shape
    widths = " x ".join(map(str, dict.fromkeys((shape.width, shape.value_width))))
    layers = f"{depth(checkpoint.text_config)} layers, {shape.heads} heads of {widths}"
    if problem := checkpoint.architecture.missing():
        return f"{layers}; parameters are not compared: {problem}"
    try:
        count, ignored = check_parameters(checkpoint)
    except ImportError as error:  # a hybrid's class needs flash-attn
        return f"{layers}; parameters are not compared, its class cannot be made here: {error}"
    unused = f"; {len(ignored)} tensors are not used ({ignored[0]}, ...)" if ignored else ""
    return f"{layers}, {count:,} parameters{unused}"


def load(
    source: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Any:
    """The causal language model in a folder, or downloaded under a hub name, in evaluation mode,
    every parameter accounted for.

    `dtype` is the type of all its floating-point parameters: by default the one its config names.
    """
    checkpoint = Checkpoint(model_folder(source))
    checkpoint.check_runs()
    model = unfilled(checkpoint, device)
    dtype = dtype or model.config.dtype
    stored = checkpoint.tensors(set(checkpoint.files) - set(checkpoint.passthrough))
    tensors = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in in_memory(stored, checkpoint.architecture).items()
    }
    fill(model, tensors, checkpoint.folder)
    model.tie_weights()
    if lost := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise InputError(
            f"{checkpoint.folder}: {lost[0]} is in no file: the model can be sliced, not run"
        )
    if dtype:
        model.config.dtype = dtype
    return model.eval()


def create(config: Config, *, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A new model at its random start, the same for the same seed."""
    if problem := (kind := architecture(config)).missing():
        raise InputError(problem)
    auto_config, auto_model = _auto_classes(kind)
    kind.shape(config)  # widths that do not divide are refused here
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = auto_config.for_model(config["model_type"], **values)
        return auto_model.from_config(made, trust_remote_code=False).to(dtype)


def save(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Path | str | None = None,
    files: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> None:
    """Write a model folder, whole or not at all; `tokenizer` is a folder to copy its files from,
    `files` are texts to put beside it, and `dtype` is the weights', by default the model's."""
    with atomic_write(folder, force=force, folder=True) as aside:
        # Not those that are copies of others: cast, they would no longer be the same tensor.
        state = {n: t for n, t in model.state_dict().items() if n not in tied_weights(model)}
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
        model.save_pretrained(aside, state_dict=cast if dtype else None)
        if dtype:
            config = read_json(aside / "config.json")
            config["dtype"] = str(dtype).removeprefix("torch.")
            (aside / "config.json").write_text(to_json(config))
        if tokenizer is not None:
            copy_companions(Path(tokenizer), aside)
        for name, text in (files or {}).items():
            (aside / name).write_text(text)


def rewrite(
    checkpoint: Checkpoint,
    folder: Path,
    new_tensor: Callable[[str, torch.Tensor], torch.Tensor],
    config: Config | None = None,
    *,
    links: bool = False,
) -> None:
    """Write a model like another to an existing folder, with tensors that `new_tensor` gives for
    their current names and what they were; it may return what it got.

    The files are the same, by name and by what is in which, and one of them at a time is in memory.
    With `links`, those in which nothing changes are hard links to the other model's.
    """
    kind, shards = checkpoint.architecture, checkpoint.shards()
    headers = dict(checkpoint.headers())
    weight_map: dict[str, str] = {}
    size = parameters = 0
    for number, shard in enumerate(shards, 1):
        stored = [name for name, file in checkpoint.files.items() if file == shard]
        current = [*rename(checkpoint.tensors(stored), headers, kind)]
        tensors = {clean: new_tensor(name, tensor) for clean, name, tensor in current}
        same = all(new is old for new, (_, _, old) in zip(tensors.values(), current, strict=True))
        if links and same and {*tensors} == {*stored}:
            link(checkpoint.folder / shard, folder / shard)
        else:
            with open_safetensors(checkpoint.folder / shard) as file:
                metadata = {**(file.metadata() or {}), "format": "pt"}
            save_file(tensors, folder / shard, metadata=metadata)
        del current
        weight_map |= dict.fromkeys(tensors, shard)
        size += sum(tensor.nbytes for tensor in tensors.values())
        parameters += sum(tensor.numel() for tensor in tensors.values())
        del tensors  # before the next ones come
        if len(shards) > 1:
            logger.info("written: %s, file %d of %d", shard, number, len(shards))
    if (checkpoint.folder / INDEX).is_file():
        about = {**read_json(checkpoint.folder / INDEX).get("metadata", {}), "total_size": size}
        if "total_parameters" in about:
            about["total_parameters"] = parameters
        (folder / INDEX).write_text(to_json({"metadata": about, "weight_map": weight_map}))
    (folder / "config.json").write_text(to_json(config or checkpoint.config))
    copy_companions(checkpoint.folder, folder)


def trained(
    model: Any, names: Container[str], shape: MixerShape
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """For `rewrite`: the named parameters of a model, wherever files hold them, in the type that
    they have there. All else stays as it is."""
    state = model.state_dict()

    def new_tensor(name: str, old: torch.Tensor) -> torch.Tensor:
        side = re.search(r"\.([qkv])_conv1d\.weight$", name)
        joint = name.replace(side[0], ".conv1d.weight") if side else name
        if name in names:
            return state[name].to(old.dtype)
        if side and joint in names:  # queries, keys and values in one tensor
            keys = shape.heads * shape.width
            start = {"q": 0, "k": keys, "v": 2 * keys}[side[1]]
            return state[joint][start : start + len(old)].to(old.dtype)
        return old

    return new_tensor


def divide(folder: Path | str) -> None:
    """Put the weights of a folder with one file into three: those with key channels, which all
    cuts change, those that recovery changes too, and the rest. So many models cut from one, with
    links to the files that stay, keep most of their weights once."""
    checkpoint = Checkpoint(folder)
    if checkpoint.shards() != [WEIGHTS]:
        return
    kind, headers = checkpoint.architecture, dict(checkpoint.headers())
    tensors_of = kind.channel_tensors(checkpoint.shape).items()
    keys = {name for name, (_, parts) in tensors_of if any(p.channels == "key" for p in parts)}
    modules = (*kind.projections, *kind.convolutions)
    trained = tuple(kind.name(n, f"{part}.") for n in checkpoint.shape.layers for part in modules)
    groups: dict[int, list[str]] = {}
    for name, stored in checkpoint.stored.items():
        group = 0 if name in keys else 1 if name.startswith(trained) else 2
        groups.setdefault(group, []).append(stored)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(sorted(groups), 1):
        named = rename(checkpoint.tensors(groups[group]), headers, kind)
        tensors = {clean: tensor for clean, _, tensor in named}
        shard = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file(tensors, checkpoint.folder / shard, metadata={"format": "pt"})
        # safetensors writes files that only their owner reads.
        shutil.copymode(checkpoint.folder / WEIGHTS, checkpoint.folder / shard)
        weight_map |= dict.fromkeys(tensors, shard)
        del tensors
    size = sum(tensor.nbytes for tensor in headers.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (checkpoint.folder / INDEX).write_text(to_json(index))
    (checkpoint.folder / WEIGHTS).unlink()


def link(source: Path, target: Path) -> None:
    """A hard link, read-only since what writes to one writes to all; or a copy where the file
    system has none, and of a symlink: what that points to is the user's, and keeps its mode."""
    aside = target.with_name(f".{target.name}")
    linked = False
    with suppress(OSError):
        if not source.is_symlink():
            os.link(source, aside)
            linked = True
    if linked:
        aside.chmod(0o444)
    else:
        shutil.copyfile(source, aside)
    aside.replace(target)


def copy_companions(source: Path, target: Path) -> None:
    for path in (path for pattern in COMPANIONS.split() for path in source.glob(pattern)):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
