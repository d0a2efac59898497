"""The command line: parse, call a function of the API, print. Options are the fields of requests;
each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import statecut
from statecut import logs
from statecut.arguments import TEXT, check_counts, check_seed
from statecut.errors import InputError
from statecut.evaluation.request import EvaluationRequest
from statecut.hub import LOCK
from statecut.pruning.methods import METHODS
from statecut.pruning.request import Request
from statecut.recovery.request import RecoveryRequest
from statecut.version import __version__

ARGUMENTS = {
    "model": "a model folder, or a downloaded hub name",
    "recover model": "the folder of the pruned model",
    "teacher": "the model that it was cut from",
    "out": "folder to write",
}
INSTALL = "`pip install -c envs/constraints.txt '.[{}]'` in a checkout"


def main(arguments: list[str] | None = None) -> int:
    return run(parser(), arguments)


def run(top: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """What a program does with a parser whose commands have set `run`."""
    logs.start(top.prog)
    options = top.parse_args(arguments)
    try:
        with _sigterm_interrupts():
            options.run(options)
            sys.stdout.flush()
    except InputError as error:
        print(f"{top.prog}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not options.install or str(error.name).startswith(("statecut", "reproduction")):
            raise
        print(f"{top.prog}: {error.name} is not installed: {options.install}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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
    """Every option says its default, once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = any(action.default is none for none in (None, False, argparse.SUPPRESS))
        if silent or "(default:" in str(action.help):
            return action.help
        shown = action.option_strings[0] if action.default is True else "%(default)s"
        return f"{action.help} (default: {shown})"


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="statecut",
        description="Prune key, query and value channels of linear-attention language models.",
    )
    top.set_defaults(install="")  # how to get the packages that only some commands need
    top.add_argument("--version", action="version", version=f"statecut {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_prune, _inspect, _recover, _evaluate, _preflight, _download, _pack):
        add(commands)
    return top


def add_request(
    commands: Commands, name: str, request: type, function: Callable[..., Any], **more: Any
) -> argparse.ArgumentParser:
    """A command that calls a function of the API with the fields of its request."""
    command = commands.add_parser(name, formatter_class=Help, **more)
    types = get_type_hints(request)
    groups: dict[str, Any] = {}
    for one in fields(request):
        if one.name == "options":  # a method's own: `_prune` adds them
            continue
        if not one.metadata:
            about = ARGUMENTS.get(f"{name} {one.name}") or ARGUMENTS[one.name]
            command.add_argument(one.name, metavar=one.name.upper(), help=about)
            continue
        title, given = one.metadata["group"], dict(one.metadata["argparse"])
        if title not in groups:
            groups[title] = command.add_argument_group(title) if title else command
        flag = given.pop("flag", f"--{one.name.replace('_', '-')}")
        hint = types[one.name]
        kind = get_args(hint)[0] if get_origin(hint) in (Union, UnionType) else hint
        if kind is bool:
            given["action"] = argparse.BooleanOptionalAction if one.default else "store_true"
        elif get_origin(kind) is Literal:
            given["choices"] = get_args(kind)
        else:
            given["type"] = kind
        given |= {"dest": one.name, "default": one.default, "help": one.metadata["help"]}
        groups[title].add_argument(flag, **given)

    def call(options: argparse.Namespace) -> None:
        named = {field.name for field in fields(request)}
        given = {key: value for key, value in vars(options).items() if key in named}
        own = {key[7:]: value for key, value in vars(options).items() if key[:7] == "option."}
        print(function(**given, **({"options": own} if own else {})))

    command.set_defaults(run=call)
    return command


def _prune(commands: Commands) -> None:
    listed = (f"  {m.name + '*' * ('text' in m.needs):17} {m.about}\n" for m in METHODS.values())
    command = add_request(
        commands,
        "prune",
        Request,
        statecut.prune,
        help="make a smaller model of one you have",
        description="Calibrate a model, choose which key and query channels stay, or which value\n"
        "channels, and write the smaller model, which AutoModelForCausalLM.from_pretrained\n"
        "loads. Give one of --ratio, --state, or --keys and --values.",
        epilog="methods (* needs text):\n" + "".join(listed),
    )
    group = command.add_argument_group("options of methods")
    for option in dict.fromkeys(option for m in METHODS.values() for option in m.takes):
        takers = ", ".join(m.name for m in METHODS.values() if option in m.takes)
        group.add_argument(
            option.flag,
            type=type(option.default),
            choices=option.choices or None,
            dest=f"option.{option.name}",
            default=argparse.SUPPRESS,
            metavar=None if option.choices else option.name.upper(),
            help=f"of {takers}: {option.help} (default: {option.default})",
        )


def gigabytes(text: str) -> float:
    return float(text.upper().removesuffix("GB"))


def _inspect(commands: Commands) -> None:
    command = commands.add_parser(
        "inspect",
        help="print what a model keeps per request, and what pruning it would save",
        description="The cache per request of a model, what each ratio saves, and which engines "
        "run the result. Reads config.json and the headers of the weights' files.",
    )
    command.add_argument(
        "model", metavar="MODEL", help=f"{ARGUMENTS['model']}; or a config.json without weights"
    )
    engine = "what is known of this engine, and what --state compares for it"
    command.add_argument("--engine", metavar="NAME", help=engine)
    command.add_argument("--json", type=Path, metavar="FILE", help="write it there too")
    add = command.add_argument_group("requests that fit, for --engine vllm or sglang").add_argument
    add("--memory", type=gigabytes, default=80.0, metavar="GB", help="of the GPU (default: 80)")
    add("--tokens", type=int, default=4096, metavar="N", help="of each request (default: 4096)")
    add("--drafts", type=int, default=0, metavar="N", help="of speculative decoding (default: 0)")
    add("--prefix-cache", action="store_true", help="count with the engine's prefix cache")

    def run(options: argparse.Namespace) -> None:
        from statecut.files import check_writable, write_json

        if options.json:
            check_writable(options.json)
        names = ("engine", "memory", "tokens", "drafts", "prefix_cache")
        given = {name: getattr(options, name) for name in names}
        inspection = statecut.inspect(options.model, **given)
        if options.json:
            write_json(options.json, asdict(inspection))
        print(inspection)

    command.set_defaults(run=run)


def _recover(commands: Commands) -> None:
    command = add_request(
        commands,
        "recover",
        RecoveryRequest,
        statecut.recover,
        help="train a pruned model to make up for what it lost",
        description="Train low-rank adapters and the convolutions of a pruned model on text and on "
        "what the\nmodel it was cut from predicts, merge them, and write the model. The same "
        "command\ncontinues where it was killed: checkpoints are in OUT.checkpoints until then. "
        "Defaults\nare the paper's.",
    )
    command.set_defaults(install=INSTALL.format("recovery"))


def _evaluate(commands: Commands) -> None:
    command = add_request(
        commands,
        "evaluate",
        EvaluationRequest,
        statecut.evaluate,
        help="print the perplexity of a text, or results of lm-eval's tasks",
        description="The perplexity of a text needs nothing but the library and a model's "
        "tokenizer; tasks need\nlm-eval, which fetches their data from the hub.",
    )
    command.set_defaults(install=INSTALL.format("evaluation"))


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
    add("--force", action="store_true", help="replace OUT if it is packed text")

    def run(options: argparse.Namespace) -> None:
        from statecut.data.packing import pack
        from statecut.data.sources import describe, read
        from statecut.data.tokenizer import load_tokenizer
        from statecut.files import check_not_overwriting, check_output_path

        check_counts(length=options.length, sequences=options.sequences, workers=options.workers)
        check_seed(options.seed)
        sources = [options.text, options.tokenizer]
        check_not_overwriting(options.out, sources, kind="packed text", marks="manifest.json")
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
