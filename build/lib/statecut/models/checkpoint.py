"""Models on disk: opened, loaded without anything left to chance, rewritten, saved whole."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from statecut.errors import InputError
from statecut.files import atomic_write, digest, read_json, sha256, to_json
from statecut.hub.downloads import model_folder
from statecut.models.architectures import architecture, register
from statecut.models.architectures.base import Architecture, Config, check_sizes, text_config

logger = logging.getLogger(__name__)

ANNOUNCE_FROM = 1_000_000_000  # bytes of a file that is announced before it is read
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    # Of multimodal models.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

# What wrappers put before a name, one around another: data parallel training, peft. torch.compile
# puts its own before the name of any part that it compiled.
WRAPPERS, COMPILED = r"^(module\.|base_model\.model\.)+", "_orig_mod."

# Names that older flash-linear-attention gave, and what they are called now.
RENAMES = (
    (r"(model\.layers\.\d+\.)attn\.norm\.weight", r"\1attn_norm.weight"),
    (r"(model\.layers\.\d+\.)mlp\.norm\.weight", r"\1mlp_norm.weight"),
)


def open_safetensors(path: Path) -> Any:
    """A safetensors file, or an error that says what is wrong with it."""
    if not path.is_file():
        raise InputError(f"{path} is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{path} is cut off or damaged: {error}") from None


def read_tensors(
    path: Path, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, all or those named, one after the other."""
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if names is None or name in names:
                yield name, file.get_tensor(name)


class Checkpoint:
    """A model folder: its config.json and its safetensors, read tensor by tensor."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        config = self.folder / "config.json"
        if not config.is_file():
            raise InputError(f"{self.folder} is no model folder: it has no config.json")
        self.config: Config = read_json(config)
        if not isinstance(self.config, dict):
            raise InputError(f"{config}: not the config of a model, which is a JSON object")
        self.text_config = text_config(self.config)
        try:
            self.architecture = architecture(self.config)
            check_sizes(self.text_config)
            self.shape = self.architecture.shape(self.config)
        except InputError as error:
            raise InputError(f"{self.folder}: {error}") from None
        self.files = self._files()
        self._headers = self._read_headers()

    def _files(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self.folder / INDEX).is_file():
            return self._indexed_files()
        if (self.folder / WEIGHTS).is_file():
            with open_safetensors(self.folder / WEIGHTS) as file:
                return dict.fromkeys(file.keys(), WEIGHTS)
        pickles = sorted(p.name for p in self.folder.glob("*.bin"))
        if pickles:
            raise InputError(
                f"{self.folder} has pickled weights only ({pickles[0]}), which can run code when "
                "they are read: `statecut download` converts those of a hub model; for your own, "
                "call save_pretrained once where you trust them"
            )
        raise InputError(f"{self.folder} is no model folder: it has neither {WEIGHTS} nor {INDEX}")

    def _indexed_files(self) -> dict[str, str]:
        """The same, from an index whose files are all in the folder."""
        files: dict[str, str] = read_json(self.folder / INDEX).get("weight_map", {})
        if not files:
            raise InputError(f"{self.folder / INDEX}: its weight_map names no tensor")
        names = sorted(set(files.values()))
        for name in names:
            if Path(name).name != name:
                raise InputError(f"{self.folder / INDEX}: {name!r} is no name of a file beside it")
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(names)} files that {INDEX} names are "
                f"missing ({missing[0]}{', ...' if missing[1:] else ''}): download or copy the "
                "model again"
            )
        return files

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Those named, or all, file by file."""
        wanted = set(self.files if names is None else names)
        absent = sorted(wanted - set(self.files))
        if absent:
            raise InputError(f"{self.folder}: no tensor named {', '.join(absent)}")
        for shard in self.shards():
            of_shard = {name for name in wanted if self.files[name] == shard}
            yield from read_tensors(self.folder / shard, of_shard)

    def tensor(self, name: str) -> torch.Tensor:
        return next(self.tensors([name]))[1]

    def shards(self) -> list[str]:
        return sorted(set(self.files.values()))

    def headers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Every tensor with its shape and type and without its numbers, which are not read."""
        return self._headers.items()

    def _read_headers(self) -> dict[str, torch.Tensor]:
        headers = {}
        for shard in self.shards():
            with open_safetensors(self.folder / shard) as file:
                stored = set(file.keys())
                for name in [name for name, file_name in self.files.items() if file_name == shard]:
                    if name not in stored:
                        raise InputError(
                            f"{self.folder}: {INDEX} says that {name} is in {shard}, and it is "
                            "not: download or copy the model again"
                        )
                    # Mapped, not read: no number of it is looked at.
                    headers[name] = file.get_tensor(name).to("meta")
        return headers

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
    def beyond(self) -> list[str]:
        """The tensors in its files that are no part of the text model."""
        return [name for name in self.files if name.startswith(self.architecture.beyond)]

    def check_no_softmax(self) -> None:
        """An error for fla's hybrids: their softmax layers need flash-attn, and buffers of no
        file."""
        if self.architecture.library == "transformers":
            return
        mixers = self.shape.layers
        others = [i for i in range(self.text_config["num_hidden_layers"]) if i not in mixers]
        if others:
            raise InputError(
                f"{self.folder}: Statecut runs no softmax attention of flash-linear-attention "
                f"(layer {', '.join(map(str, others))}); it can cut such a model by methods "
                "that need no text, without refitting it (`statecut prune --help`)"
            )

    def check_text_only(self) -> None:
        """An error for a folder with more than the text model, where only that is written."""
        if self.beyond:
            raise InputError(
                f"{self.folder}: {len(self.beyond)} tensors beyond the text model "
                f"({self.beyond[0]}, ...) would be lost; "
                "recovery takes folders of text models alone, `statecut prune --refit` any"
            )

    @cached_property
    def stored(self) -> dict[str, str]:
        """How the files call each tensor, by its current name."""
        return {
            current: name
            for name in self.files
            if (current := current_name(name, self.architecture))
        }

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


def current_name(name: str, kind: Architecture) -> str | None:
    """What a tensor is called now, or None for one that no forward pass used."""
    name = re.sub(WRAPPERS, "", name.replace(COMPILED, ""))
    if name.startswith(kind.text_model):
        name = "model." + name.removeprefix(kind.text_model)
    for old, new in RENAMES:
        name = re.sub(f"^{old}$", new, name)
    mixer = re.escape(kind.mixer).replace(r"\{layer\}", r"\d+")
    match = re.fullmatch(f"{mixer}(.+)", name)
    return None if match and match[1] in kind.unused else name


def current_names(
    headers: Iterable[tuple[str, torch.Tensor]], kind: Architecture
) -> dict[str, list[str]]:
    """What stored tensors are called now: none for one that no forward pass used, two for the
    MLP's gate and up matrices, once joined."""
    names, shapes = {}, {}
    for stored, header in headers:
        current = current_name(stored, kind)
        names[stored] = [current] if current else []
        if current:
            shapes[current] = header.shape
    for gate in [current for current in names.values() if current]:
        if gate[0].endswith(".mlp.gate_proj.weight"):
            up, down = (gate[0].replace("gate_proj", f"{part}_proj") for part in ("up", "down"))
            if up not in shapes and down in shapes and shapes[gate[0]][0] == 2 * shapes[down][1]:
                gate.append(up)
    return names


def rename(
    tensors: Iterable[tuple[str, torch.Tensor]], names: Mapping[str, list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored tensors by their `current_names`."""
    for stored, tensor in tensors:
        match names[stored]:
            case [name]:
                yield name, tensor
            case [gate, up]:
                halves = tensor.chunk(2)
                yield gate, halves[0].clone()
                yield up, halves[1].clone()


def with_current_names(
    tensors: Iterable[tuple[str, torch.Tensor]], kind: Architecture
) -> dict[str, torch.Tensor]:
    """Tensors by their current names; the MLP's gate and up matrices, once joined, apart."""
    stored = dict(tensors)
    return dict(rename(stored.items(), current_names(stored.items(), kind)))


def in_memory(
    tensors: Iterable[tuple[str, torch.Tensor]], kind: Architecture
) -> dict[str, torch.Tensor]:
    """The text model's tensors as files have them, to those of the model in memory."""
    return kind.joined(with_current_names(tensors, kind))


def check_fit(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: Path
) -> None:
    """An error that names all tensors that are missing, unexpected or of another shape."""
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected))
    misfits = [
        f"{name} is {list(tensors[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(set(expected) & set(tensors))
        if tensors[name].shape != expected[name].shape
    ]
    problems = [
        f"{kind}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if names[8:] else ''}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misfits),
        )
        if names
    ]
    if problems:
        raise InputError(f"{where}: the parameters do not fit the model; " + "; ".join(problems))


def _auto_classes() -> tuple[Any, Any]:
    """transformers' Auto classes, with every architecture of ours registered and runnable."""
    from statecut.models import kernels
    from statecut.models.fixes.transformers import split_olmo_filters_by_width

    kernels.prepare()
    register()
    split_olmo_filters_by_width()
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar for every file, in logs that nobody watches
    return AutoConfig, AutoModelForCausalLM


def unfilled(
    checkpoint: Checkpoint, device: torch.device | str = "cpu"
) -> tuple[Any, dict[str, torch.Tensor], set[str]]:
    """The text model of a folder's config without memory for its parameters, the tensors that it
    needs, and the names of those that are others' copies. What is computed from the config alone
    is on the device."""
    auto_config, auto_model = _auto_classes()
    whole = auto_config.from_pretrained(checkpoint.folder, trust_remote_code=False)
    config = whole.get_text_config()
    # A multimodal config may name it in one place only.
    config.tie_word_embeddings = whole.tie_word_embeddings or config.tie_word_embeddings
    with torch.device("meta"):
        model = auto_model.from_config(config, trust_remote_code=False)
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):  # rotary angles, which no file holds
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    expected = model.state_dict()
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    for name in tied:
        del expected[name]
    return model, expected, tied


def check_parameters(checkpoint: Checkpoint) -> tuple[int, list[str]]:
    """How many parameters a model has, and the tensors in its files that `load` ignores.

    Names and shapes come from the headers of the files; what `load` would refuse is refused.
    """
    _, expected, tied = unfilled(checkpoint)
    kind, beyond = checkpoint.architecture, checkpoint.beyond
    stored = {name: tensor for name, tensor in checkpoint.headers() if name not in beyond}
    tensors = {name: t for name, t in in_memory(stored.items(), kind).items() if name not in tied}
    check_fit(tensors, expected, checkpoint.folder)
    ignored = [name for name in stored if current_name(name, kind) in (None, *tied)]
    return sum(tensor.numel() for tensor in tensors.values()), [*ignored, *beyond]


def load(
    source: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Any:
    """The causal language model in a folder, or downloaded under a hub name, in evaluation mode,
    every parameter accounted for.

    `dtype` is the type of all its floating-point parameters: by default the one its config names.
    """
    checkpoint = Checkpoint(model_folder(source))
    checkpoint.check_no_softmax()
    model, expected, tied = unfilled(checkpoint, device)
    dtype = dtype or model.config.dtype
    tensors = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).to(device)
        for name, tensor in in_memory(
            checkpoint.tensors(set(checkpoint.files) - set(checkpoint.beyond)),
            checkpoint.architecture,
        ).items()
        if name not in tied
    }
    check_fit(tensors, expected, checkpoint.folder)
    model.load_state_dict(tensors, strict=False, assign=True)
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
    auto_config, auto_model = _auto_classes()
    architecture(config).shape(config)  # widths that do not divide are refused here
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_model.from_config(
            auto_config.for_model(config["model_type"], **values), trust_remote_code=False
        )
    return model.to(dtype)


def save(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Path | str | None = None,
    card: str | None = None,
    force: bool = False,
) -> None:
    """Write a model folder, whole or not at all; `tokenizer` is a folder to copy its files from."""
    with atomic_write(folder, force=force, folder=True) as aside:
        model.save_pretrained(aside)
        if tokenizer is not None:
            copy_companions(Path(tokenizer), aside)
        if card is not None:
            (aside / "README.md").write_text(card)


def rewrite(
    checkpoint: Checkpoint,
    folder: Path,
    new_tensor: Callable[[str, torch.Tensor], torch.Tensor],
    config: Config | None = None,
) -> None:
    """Write a model like another to an existing folder, with tensors that `new_tensor` gives for
    their current names and what they were; it may return what it got.

    The files are the same, by name and by what is in which, and one of them at a time is in memory.
    """
    names = current_names(checkpoint.headers(), checkpoint.architecture)
    weight_map: dict[str, str] = {}
    size = parameters = 0
    shards = checkpoint.shards()
    for number, shard in enumerate(shards, 1):
        stored = [name for name, file in checkpoint.files.items() if file == shard]
        tensors = {
            checkpoint.architecture.stored_name(name): new_tensor(name, tensor)
            for name, tensor in rename(checkpoint.tensors(stored), names)
        }
        with open_safetensors(checkpoint.folder / shard) as file:
            metadata = {**(file.metadata() or {}), "format": "pt"}
        save_file(tensors, folder / shard, metadata=metadata)
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
        index = {"metadata": about, "weight_map": weight_map}
        (folder / INDEX).write_text(to_json(index))
    (folder / "config.json").write_text(to_json(config or checkpoint.config))
    copy_companions(checkpoint.folder, folder)


def copy_companions(source: Path, target: Path) -> None:
    """The tokenizer and what else goes with a model whatever its widths."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
