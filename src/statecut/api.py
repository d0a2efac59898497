"""What `import statecut` offers. A `Model` is a folder, a hub name that was downloaded, or a model
in memory; `tokens` are ids (sequences, length). What is wrong with arguments is an `InputError`,
said before torch is imported where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, get_type_hints

from statecut.arguments import Eps, Target, check_counts, check_length, check_seed, check_word
from statecut.arguments import width as width_of
from statecut.errors import InputError
from statecut.evaluation.request import EvaluationRequest
from statecut.hub import model_folder, model_name
from statecut.pruning.request import Request, check_out
from statecut.record import Record, record_of, set_origin, stored_dtype
from statecut.recovery.request import RecoveryRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from statecut.evaluation.evaluate import Evaluation
    from statecut.models.checkpoint import Checkpoint
    from statecut.models.loaded import Loaded
    from statecut.pruning.calibration import Calibration
    from statecut.pruning.prune import Pruned
    from statecut.pruning.refit import Refit
    from statecut.pruning.selection import Selection
    from statecut.serving.inspection import Inspection

    Model: TypeAlias = str | Path | PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _takes(request: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """The fields of a request as the arguments of a function: the command has the same options."""

    def decorate(function: Callable[[R], T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            made = request(*args, **kwargs)
            for name, hint in get_type_hints(request).items():
                check_word(name, getattr(made, name), hint)
            return function(made)

        returned = signature(function).return_annotation
        call.__signature__ = signature(request).replace(  # type: ignore[attr-defined]
            return_annotation=returned
        )
        return call

    return decorate


@_takes(Request)
def prune(request: Request) -> Pruned:
    """Calibrate a model, choose the channels that stay, and write the smaller model to a folder.

    >>> pruned = statecut.prune("model", "smaller", ratio=0.5, text="corpus.jsonl")
    >>> print(pruned)  # the summary

    Arguments are the options of `statecut prune --help` (`round_to=16` for `--round-to 16`);
    `options={"f": 2.0}` are those of the method. From disk to disk, a file at a time.
    """
    plan = request.plan()
    from statecut.pruning.prune import run

    return run(request, plan)


@_takes(RecoveryRequest)
def recover(request: RecoveryRequest) -> Pruned:
    """Train a pruned model to make up for what it lost, and write it to a folder.

    >>> print(statecut.recover("smaller", "model", "recovered", text="corpus.jsonl", steps=200))

    Arguments are the options of `statecut recover --help`. Killed and called again with the same
    arguments it goes on from its last checkpoint.
    """
    request.check()
    from statecut.recovery.recover import run

    return run(request)


@_takes(EvaluationRequest)
def evaluate(request: EvaluationRequest) -> Evaluation:
    """The perplexity of a text, and results of lm-eval's tasks.

    >>> print(statecut.evaluate("smaller", text="corpus.jsonl", sequences=16))
    >>> statecut.evaluate("smaller", tasks="wikitext,lambada_openai").tasks["wikitext"]
    """
    request.check()
    from statecut.evaluation.evaluate import run

    return run(request)


def inspect(
    model: str | Path,
    *,
    engine: str | None = None,
    memory: float = 80,
    tokens: int = 4096,
    drafts: int = 0,
    prefix_cache: bool = False,
) -> Inspection:
    """What a model keeps per request, and what cutting it would save. No weights are read, and a
    config.json alone will do.

    With vLLM or SGLang as the engine also how many requests of so many tokens fit into a GPU with
    `memory` GB, as that engine counts; `drafts` are tokens of speculative decoding.

    >>> print(statecut.inspect("model"))
    """
    from statecut.files import read_json
    from statecut.models.description import Description, ModelFolder
    from statecut.pruning.budget import splits
    from statecut.serving import inspection
    from statecut.serving.engines import engine_named
    from statecut.serving.memory import Load

    described: Description
    if Path(model).suffix == ".json":
        described = Description(read_json(model), model)
    else:
        described = ModelFolder(model_folder(model))
    named = engine_named(engine) if engine else None
    if named:
        named.check_model(described.architecture.model_type)
    check_counts(tokens=tokens, drafts=drafts or None)
    load = Load(memory * 1e9, tokens, drafts, prefix_cache)
    return inspection.inspect(described, splits(described, named), named, load)


def load(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The language model in a folder, in evaluation mode, every parameter accounted for.

    `dtype` is the type of its parameters: by default float32 on a CPU, where it runs in plain
    PyTorch and 16 bits are slow, and bfloat16 on a GPU.

    >>> model = statecut.load("model")
    >>> model(torch.zeros(1, 8, dtype=torch.long)).logits.shape  # (batch, length, vocabulary)
    """
    from statecut.models import checkpoint

    source = checkpoint.Checkpoint(model_folder(model))
    dtype = dtype or source.compute_dtype(device)
    loaded: PreTrainedModel = checkpoint.load(source.folder, dtype=dtype, device=device)
    loaded.name_or_path = str(source.folder)
    set_origin(loaded, Record.read(source.folder), source.dtype)
    return loaded


def save(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> None:
    """Write a model in memory to a folder, whole or not at all, with the tokenizer of the folder
    that it was loaded from, statecut.json and a card.

    `dtype` is the type of the weights that are written: by default the 16 bits that the folder had,
    or else the model's own.

    >>> statecut.save(smaller, "smaller")
    """
    import torch

    from statecut.models import checkpoint
    from statecut.models.loaded import Loaded

    origin = Path(model.name_or_path) if model.name_or_path else None
    check_out(Path(folder), [origin] if origin else [], None, force=force)
    record = record_of(model)
    files = record.files(Path(folder).name, Loaded(model).config) if record.entries else {}
    if dtype is None and stored_dtype(model) in ("bfloat16", "float16"):
        dtype = getattr(torch, stored_dtype(model))
    checkpoint.save(model, folder, tokenizer=origin, files=files, dtype=dtype, force=force)


def tokenize(
    text: str | Path, model: str | Path, *, sequences: int = 128, length: int = 2048, seed: int = 0
) -> torch.Tensor:
    """Token ids (sequences, length) of a text, by the tokenizer in a model's folder.

    >>> tokens = statecut.tokenize("corpus.jsonl", "model", sequences=16, length=128)
    """
    from statecut.evaluation.perplexity import read_tokens
    from statecut.models.checkpoint import Checkpoint

    check_counts(sequences=sequences)
    check_length(length)
    check_seed(seed)
    opened = Checkpoint(model_folder(model))
    return read_tokens(text, opened, sequences=sequences, length=length, seed=seed)


def calibrate(
    model: Model,
    tokens: torch.Tensor,
    *,
    gradients: bool = True,
    values: bool = False,
    rows: int = 5000,
    seed: int = 0,
    batch: int = 8,
    device: str | None = None,
) -> Calibration:
    """All that methods need to know of a model's activations, from one pass over tokens
    (sequences, length).

    `values=True` measures what choosing value channels needs, too. Without `gradients` (which
    `fisher` and `grad` need) a model in a folder is run layer by layer, so that it need not fit
    into memory. `rows` is the size of drrqr's sample.

    >>> calibration = statecut.calibrate(model, tokens)
    >>> calibration.gram("k", "all", "raw").shape  # (layers, heads, d_k, d_k)
    """
    from statecut.pruning import calibration

    check_counts(rows=rows)
    check_seed(seed)
    source = _opened(model)
    return calibration.calibrate(
        source,
        _checked(tokens, source, batch).split(batch),
        gradients=gradients,
        device=_device(model, device),
        sample_rows=rows,
        seed=seed,
        values=values,
    )


def select(
    model: Model,
    calibration: Calibration | None = None,
    *,
    keys: int | None = None,
    values: int | None = None,
    ratio: float | None = None,
    method: str = "fisher",
    target: Target | None = None,
    seed: int = 0,
    **options: Any,
) -> Selection:
    """Which channels stay: `keys` and `values` are numbers per head, `ratio` is the share of key
    channels that goes, and of values where both have one width; it is not rounded here as it is by
    `prune`. Methods `l1` and `rand` need
    no calibration; options are the method's own.

    >>> kept = statecut.select(model, calibration, method="drrqr", keys=8, f=2.0)
    >>> kept.tensors["kept"].shape  # (layers, heads, keys)
    """
    from statecut.pruning import select as selecting
    from statecut.pruning.statistics import ModelStatistics

    check_seed(seed)
    statistics = ModelStatistics(_opened(model), calibration)
    shape = statistics.checkpoint.shape
    square = statistics.checkpoint.architecture.square
    if ratio is not None:
        keys = width_of(shape.width, ratio)
        values = keys if square else values
    if square:
        statistics.checkpoint.resized(keys or shape.width, values)
    chosen = []
    for channels, width, full in (("key", keys, shape.width), ("value", values, shape.value_width)):
        if width is not None and not 0 < width < full:
            raise InputError(f"{channels}s {width}: must lie between 1 and {full - 1}")
        if width is not None:
            given = {"channels": channels, "target": target, "seed": seed, **options}
            chosen += selecting.select(method, statistics, [width], **given)
    if not chosen:
        raise InputError("how many channels stay is missing: give keys, values, both, or ratio")
    return chosen[0].with_values(chosen[1]) if len(chosen) > 1 else chosen[0]


def slice(model: Model, kept: Selection, *, eps: Eps = "matched") -> PreTrainedModel:
    """The smaller model, in memory; a model in a folder is loaded first (`prune` and
    `statecut.pruning.slicing.slice_model` write one that is too large for memory).

    With `eps="matched"` it computes what the model does with the cut channels set to zero.

    >>> smaller = statecut.slice(model, kept)
    """
    from statecut.models.loaded import Loaded
    from statecut.pruning.slicing import slice_in_memory

    check_word("eps", eps, Eps)
    loaded = load(model) if isinstance(model, str | Path) else model
    source = Loaded(loaded)
    # A choice made for a folder names the digest of its files.
    kept.check_model(_opened(model))
    sliced: PreTrainedModel = slice_in_memory(loaded, **kept.changes(), eps=eps)
    sliced.name_or_path = loaded.name_or_path
    base = {"name": model_name(source.place)}
    record = record_of(loaded).then(base=base, cut=kept.entry(source, eps))
    set_origin(sliced, record, stored_dtype(loaded))
    return sliced


def refit(
    smaller: Model,
    model: Model,
    tokens: torch.Tensor,
    *,
    out: str | Path | None = None,
    batch: int = 8,
    device: str | None = None,
    force: bool = False,
) -> Refit:
    """Fit what is linear behind each delta rule of a cut model to the model it was cut from, in
    closed form, on tokens (sequences, length). A model in memory is changed in place; of one in a
    folder `out` is the folder to write.

    >>> fits = statecut.refit(smaller, model, tokens).fits  # one for each projection
    """
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning import refit as fitting

    on_disk = isinstance(smaller, str | Path)
    if on_disk != (out is not None):
        wanted = "give out, the folder to write" if on_disk else "leave out away"
        raise InputError(f"refit of a model {'in a folder' if on_disk else 'in memory'}: {wanted}")
    student, teacher = _opened(smaller), _opened(model)
    if out is not None:
        check_out(Path(out), [Path(m.place) for m in (student, teacher)], None, force=force)
    ids = _checked(tokens, student, batch)
    result = fitting.refit(student, teacher, ids, device=_device(smaller, device), batch=batch)
    entry = result.entry()
    if isinstance(student, Checkpoint) and out is not None:
        base = {"name": model_name(student.folder), "digest": student.digest()}
        record = Record.read(student.folder).then(base=base, refit=entry)
        files = record.files(Path(out).name, student.config)
        fitting.write_refitted(student, result, out, files=files, force=force)
    else:
        set_origin(smaller, record_of(smaller).also(refit=entry), stored_dtype(smaller))
    return result


def perplexity(
    model: Model, tokens: torch.Tensor, *, batch: int = 8, device: str | None = None
) -> float:
    """Of tokens (sequences, length): the exponential of the mean cross-entropy.

    >>> statecut.perplexity(smaller, tokens)
    """
    from statecut.evaluation.perplexity import perplexity as computed

    source = _opened(model)
    ids = _checked(tokens, source, batch)
    return computed(source, ids, device=_device(model, device), batch=batch)


def _checked(tokens: torch.Tensor, model: Checkpoint | Loaded, batch: int) -> torch.Tensor:
    """Ids that the model has, of more than one token each; on the CPU."""
    import torch

    check_counts(batch=batch)
    ids = isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int64, torch.int32)
    if not ids or tokens.ndim != 2 or not len(tokens):
        raise InputError("tokens: must be ids (sequences, length), as statecut.tokenize gives them")
    check_length(tokens.shape[1])
    low, high, size = int(tokens.min()), int(tokens.max()), model.text_config["vocab_size"]
    if not 0 <= low <= high < size:
        raise InputError(f"tokens: has ids {low} to {high}, the model's are 0 to {size - 1}")
    return tokens.cpu()


def _opened(model: Model) -> Checkpoint | Loaded:
    if isinstance(model, str | Path):
        from statecut.models.checkpoint import Checkpoint

        return Checkpoint(model_folder(model))
    from statecut.models.loaded import Loaded

    return Loaded(model)


def _device(model: Model, device: str | None) -> str:
    """A model in memory stays where it is."""
    from statecut.models.kernels import checked_device

    if isinstance(model, str | Path):
        return checked_device(device)
    return str(model.device)
