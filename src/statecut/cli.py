"""The command line: parse, call, print. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias, get_args

from statecut import REFIT, __version__, logs
from statecut.arguments import Eps, Target, check_counts, check_seed
from statecut.errors import InputError
from statecut.hub import LOCK, model_folder
from statecut.pruning.methods import METHODS
from statecut.serving.engines import ENGINES

MODEL = "a model folder, or a downloaded hub name"
TEXT = ".jsonl, .txt (.xz .gz .zst) or a data set's folder"
PROSE = "the prose of the installed Python packages if not given"
DEVICE = "cuda or cpu; the GPU if there is one"
FORCE = "replace OUT if it exists"


def main(arguments: list[str] | None = None) -> int:
    return run(parser(), arguments)


def run(top: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """What a program does with a parser whose commands have set `run`."""
    logs.start(top.prog)
    options = top.parse_args(arguments)
    try:
        with _sigterm_interrupts():
            options.run(options)
    except InputError as error:
        print(f"{top.prog}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not options.install or str(error.name).startswith(("statecut", "reproduction")):
            raise
        print(f"{top.prog}: {error.name} is not installed: {options.install}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{top.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, which removes temporary folders. Training has a
    handler of its own, which saves a checkpoint."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Help(argparse.RawDescriptionHelpFormatter):
    """Every option says its default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if shown else action.help


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="statecut",
        description="Prune key, query and value channels of linear-attention language models.",
    )
    top.set_defaults(install="")  # how to get the packages that only some commands need
    top.add_argument("--version", action="version", version=f"statecut {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_prune, _inspect, _recover, _preflight, _download, _pack):
        add(commands)
    return top


def _prune(commands: Commands) -> None:
    listed = (f"  {m.name + '*' * ('text' in m.needs):17} {m.about}\n" for m in METHODS.values())
    command = commands.add_parser(
        "prune",
        help="make a smaller model of one you have",
        description="Calibrate a model, choose which key and query channels stay, or which value\n"
        "channels, and write the smaller model, which AutoModelForCausalLM.from_pretrained\n"
        "loads. Give one of --ratio, --state, or --keys and --values.",
        epilog="methods (* needs text):\n" + "".join(listed),
        formatter_class=Help,
    )
    add = command.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("out", metavar="OUT", type=Path, help="folder to write")
    add("--method", default="drrqr", help="see below")
    add("--ratio", type=float, help="share of key channels to remove, in (0, 1); values stay")
    share = (
        "share of the recurrent state that may stay, in (0, 1): a few splits of it between keys "
    )
    share += "and values are cut, refitted and compared on text held out, and the best is written"
    add("--state", type=float, metavar="SHARE", help=share)
    add("--keys", type=int, metavar="N", help="key channels per head to keep")
    add("--values", type=int, metavar="N", help="value channels per head to keep")
    target = "whose activations choose the key channels, those of keys, queries or both; queries "
    target += "and keys always lose the same ones; the method's own choice if not given, mostly kq"
    add("--target", choices=get_args(Target), help=target)
    add("--text", type=Path, help=f"calibration text: {TEXT}; {PROSE}")
    seed = "of the order of the text, the sample of rows and the channels that rand samples"
    add("--seed", type=int, default=0, help=seed)
    rounding = (
        "with --ratio, keep a multiple of N channels, rounding up; 16 is fast. With --state, "
    )
    rounding += "compare only multiples of N (of 16, or of less where those are too few)"
    add("--round-to", type=int, metavar="N", help=rounding)
    engine = "keep numbers of channels that this engine runs, with --ratio rounding up, and print "
    engine += f"how to start it: {', '.join(ENGINES)}"
    add("--for", dest="engine", metavar="ENGINE", help=engine)
    add("--sequences", type=int, default=128, help="calibration sequences")
    add("--length", type=int, default=2048, help="tokens per sequence")
    add("--rows", type=int, default=5000, help="tokens in the sample of drrqr, qrcp")
    add("--batch", type=int, default=8, help="sequences per batch")
    refit = "fit what is linear behind each delta rule again, in closed form, on the same text; "
    refit += "every method then needs text; --state needs it, else "
    refit += f"{'--refit' if REFIT else '--no-refit'} by default"
    add("--refit", action=argparse.BooleanOptionalAction, help=refit)
    eps = (
        "of the output norms: matched makes the cut model compute what the unpruned one does with "
    )
    eps += "the cut channels set to zero; kept leaves it, as the paper's code does"
    add("--eps", choices=get_args(Eps), default="matched", help=eps)
    dtype = "of the weights that are written; the model's own if not given, but bfloat16 for a "
    dtype += "float32 DeltaNet, whose kernel refuses it"
    add("--dtype", choices=["bfloat16", "float32", "float16"], help=dtype)
    add("--device", help=DEVICE)
    add("--force", action="store_true", help=FORCE)
    for option in dict.fromkeys(option for m in METHODS.values() for option in m.takes):
        takers = ", ".join(m.name for m in METHODS.values() if option in m.takes)
        add(
            option.flag,
            type=type(option.default),
            choices=option.choices or None,
            dest=f"option.{option.name}",
            default=argparse.SUPPRESS,
            metavar=None if option.choices else option.name.upper(),
            help=f"of {takers}: {option.help} (default: {option.default})",
        )

    def run(options: argparse.Namespace) -> None:
        from statecut.pruning.prune import Request, prune

        given = vars(options)
        fields = {name: given[name] for name in given if name in Request.__dataclass_fields__}
        own = {key[7:]: value for key, value in given.items() if key[:7] == "option."}
        model, device = model_folder(options.model), _device(options.device)
        request = Request(**fields | {"model": model, "device": device, "options": own})
        print(*prune(request), sep="\n")

    command.set_defaults(run=run)


def _inspect(commands: Commands) -> None:
    command = commands.add_parser(
        "inspect",
        help="print what is in a model, and what pruning it would save",
        description="Layers, heads and widths of a model, its cache per request, what each ratio "
        "saves, and which engines run the result. Reads config.json and the headers of the "
        "weights' files.",
    )
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument("--json", type=Path, metavar="FILE", help="write it there too")

    def run(options: argparse.Namespace) -> None:
        from statecut.files import check_writable, write_json
        from statecut.models.checkpoint import Checkpoint
        from statecut.pruning.budget import budgets
        from statecut.pruning.slicing import check_sliceable
        from statecut.serving.inspection import inspect

        if options.json:
            check_writable(options.json)
        checkpoint = Checkpoint(model_folder(options.model))
        check_sliceable(checkpoint)
        inspection = inspect(checkpoint, budgets(checkpoint))
        if options.json:
            write_json(options.json, asdict(inspection))
        print(*inspection.lines(), sep="\n")

    command.set_defaults(run=run)


def _recover(commands: Commands) -> None:
    command = commands.add_parser(
        "recover",
        help="train a pruned model to make up for what it lost",
        description="Train low-rank adapters and the convolutions of a pruned model on text and on "
        "what the model it was cut from predicts, merge them, and write the model. The same "
        "command continues where it was killed. Defaults are the paper's.",
        formatter_class=Help,
    )
    add = command.add_argument
    add("model", metavar="MODEL", help=f"the pruned model, refitted or not: {MODEL}")
    add("teacher", metavar="TEACHER", help="the model that it was cut from")
    out = "folder to write; checkpoints are in OUT.checkpoints until it is written"
    add("out", metavar="OUT", type=Path, help=out)
    add("--text", type=Path, help=f"to train on: {TEXT}; {PROSE}")
    add("--steps", type=int, default=2000, help="of training")
    add("--batch", type=int, default=16, help="sequences per step")
    passes = "passes that a step's sequences are divided into: more need less memory"
    add("--gradient-accumulation-steps", type=int, default=2, metavar="N", help=passes)
    add("--length", type=int, default=2048, help="tokens per sequence")
    add("--epochs", type=int, default=1, help="passes over the text: more need less of it")
    add("--learning-rate", type=float, default=1e-4, help="peak")
    add("--seed", type=int, default=42, help="of adapters and the text's order")
    add("--device", help=DEVICE)
    add("--force", action="store_true", help=FORCE)

    def run(options: argparse.Namespace) -> None:
        from statecut.recovery import recover
        from statecut.recovery.settings import Recovery

        lines = recover.recover_folder(
            model_folder(options.model),
            model_folder(options.teacher),
            options.out,
            text=options.text,
            length=options.length,
            settings=Recovery(
                data=options.text.name if options.text else "documentation",
                steps=options.steps,
                batch=options.batch,
                gradient_accumulation_steps=options.gradient_accumulation_steps,
                epochs=options.epochs,
                learning_rate=options.learning_rate,
                warmup=options.steps // 20,
                seed=options.seed,
            ),
            device=_device(options.device),
            force=options.force,
        )
        print(*lines, sep="\n")

    install = "`pip install -c envs/constraints.txt '.[recovery]'` in a checkout"
    command.set_defaults(run=run, install=install)


def _device(name: str | None) -> str:
    """The device of that name; without one the GPU, or the CPU where there is none."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        devices = "cpu or cuda" if torch.cuda.is_available() else "cpu, there is no GPU"
        raise InputError(f"--device {name}: give {devices}")
    return name


def _preflight(commands: Commands) -> None:
    command = commands.add_parser(
        "preflight",
        help="check on this GPU which shapes can be trained",
        description="Forward and backward of the delta rules against an fp32 recurrence, then "
        "whole layers, each shape in a process of its own. Keys whose width does not train are "
        "padded to the next that does; exits 1 if there is none.",
        formatter_class=Help,
    )
    add = command.add_argument
    add("--kernel", required=True, help="the delta rule, as delta_net")
    add("--widths", required=True, metavar="N,N,...", help="key channels per head")
    add("--heads", type=int, metavar="N", help="heads of keys (as published models have)")
    add("--value-heads", type=int, metavar="N", help="heads of values (as many as of keys)")
    width = "value channels per head (as published models have)"
    add("--value-width", type=int, metavar="N", help=width)
    add("--json", type=Path, metavar="DIR", help="write SHAPE.json for each there")
    add("--limit", type=float, default=900, metavar="S", help="seconds for one shape")
    jobs = "shapes at a time: most of the work is compiling"
    add("--jobs", type=int, default=1, metavar="N", help=jobs)

    def run(options: argparse.Namespace) -> None:
        import torch

        from statecut import preflight
        from statecut.files import check_writable, write_json

        if options.jobs < 1 or not options.limit > 0:
            raise InputError("--jobs must be 1 or more, and --limit more than 0")
        names = ("kernel", "widths", "heads", "value_heads", "value_width")
        shapes = preflight.requested_shapes(**{name: getattr(options, name) for name in names})
        if options.json is not None:
            for shape in shapes:
                check_writable(options.json / f"{shape.name}.json")
        gpu = torch.cuda.is_available()
        print(torch.cuda.get_device_name() if gpu else "no GPU: checking plain PyTorch on a CPU")
        print(preflight.TABLE_HEAD, flush=True)
        verdicts = preflight.check_shapes(shapes, limit_s=options.limit, jobs=options.jobs)
        all_train = True
        for verdict in verdicts:
            print(preflight.table_row(verdict), flush=True)
            if options.json is not None:
                write_json(options.json / f"{verdict.shape.name}.json", asdict(verdict))
            all_train &= verdict.trainable
        if not all_train:
            raise SystemExit(1)

    command.set_defaults(run=run)


def _download(commands: Commands) -> None:
    command = commands.add_parser(
        "download",
        help="fetch a model from the hub",
        description="Fetch a model and its tokenizer at a pinned commit, and write commit and "
        f"hashes to {LOCK}. Goes on where it was cut off.",
    )
    command.add_argument("model", nargs="+", metavar="OWNER/NAME", help="models to fetch")
    newest = "take the newest commit of the branch, not the locked one"
    command.add_argument("--update", action="store_true", help=newest)

    def run(options: argparse.Namespace) -> None:
        from statecut.hub import HubItem, fetch, resolve
        from statecut.models.checkpoint import describe

        items = [HubItem("model", name) for name in options.model]
        if failures := fetch(items, update=options.model if options.update else ()):
            again = "not downloaded (the same command goes on from here):"
            raise InputError("\n  ".join([again, *failures.values()]))
        for item in items:
            folder = resolve(*item.key)
            print(f"{item.name} at {folder.name[:8]}: {describe(folder)}")

    command.set_defaults(run=run)


def _pack(commands: Commands) -> None:
    command = commands.add_parser(
        "pack",
        help="turn text into a packed token file",
        description="Tokenize text into sequences of one length: OUT/tokens.bin and its manifest.",
        formatter_class=Help,
    )
    add = command.add_argument
    add("text", type=Path, metavar="TEXT", help=TEXT)
    add("out", type=Path, metavar="OUT", help="folder to write")
    add("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    add("--length", type=int, default=2048, help="tokens per sequence")
    add("--sequences", type=int, help="how many; all that the text gives if absent")
    add("--field", default="text", help="the field of a record that is the text")
    add("--seed", type=int, default=0, help="of the order of documents")
    add("--workers", type=int, default=1, help="threads; any number gives the same")
    add("--force", action="store_true", help=FORCE)

    def run(options: argparse.Namespace) -> None:
        from statecut.data.packing import pack
        from statecut.data.sources import describe, read
        from statecut.data.tokenizer import load_tokenizer
        from statecut.files import check_not_overwriting, check_output_path

        check_counts(length=options.length, sequences=options.sequences, workers=options.workers)
        check_seed(options.seed)
        sources = [options.text, options.tokenizer]
        check_not_overwriting(options.out, sources, kind="packed text", mark="manifest.json")
        check_output_path(options.out, force=options.force, folder=True)
        manifest = pack(
            read(options.text, field=options.field, seed=options.seed),
            load_tokenizer(options.tokenizer),
            options.out,
            sequence_length=options.length,
            sequences=options.sequences,
            source=describe(options.text),
            seed=options.seed,
            workers=options.workers,
            force=options.force,
        )
        print(f"{options.out}: {manifest.sequences:,} sequences, {manifest.tokens:,} tokens")

    command.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
