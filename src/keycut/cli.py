"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from keycut import REFIT, __version__, logs
from keycut.config.section import Eps
from keycut.engines import ENGINES
from keycut.errors import InputError
from keycut.hub.downloads import DOWNLOADS, model_folder
from keycut.selection.methods import METHODS

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    logs.start()
    options = parser().parse_args(arguments)
    try:
        with _sigterm_interrupts():
            options.run(options)
    except InputError as error:
        print(f"keycut: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not options.workflow or str(error.name).startswith("keycut"):
            raise
        print(
            f"keycut: {error.name} is not installed, and this needs the packages of the workflow: "
            "in a checkout of Keycut, `make setup` or `pip install -c envs/constraints.txt -e "
            "'.[workflow]'`",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("keycut: interrupted", file=sys.stderr)
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


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="keycut",
        description="Prune key, query and value channels of linear-attention language models.",
    )
    top.set_defaults(workflow=False)  # whether the command needs the packages of the workflow
    top.add_argument("--version", action="version", version=f"keycut {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_prune, _inspect, _recover, _check, _preflight, _plan, _compare, _download, _pack):
        add(commands)
    return top


def _prune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "prune",
        help="make a smaller model of one you have",
        description="Calibrate a model, choose which key and query channels stay, or which value\n"
        "channels, and write the smaller model, which AutoModelForCausalLM.from_pretrained\n"
        "loads. Give one of --ratio, --state, or --keys and --values.",
        epilog="methods (* needs text):\n"
        + "".join(
            f"  {m.name + '*' * ('text' in m.needs):17} {m.about}\n" for m in METHODS.values()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("model", metavar="MODEL", help="a model folder, or a downloaded hub name")
    command.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    command.add_argument("--method", default="drrqr", help="see below; %(default)s")
    command.add_argument(
        "--ratio", type=float, help="share of key channels to remove, in (0, 1); values stay"
    )
    command.add_argument("--state", type=float, metavar="SHARE",
                         help="share of the recurrent state that may stay, in (0, 1): a few splits "
                         "of it between keys and values are cut, refitted and compared on text "
                         "held out, and the best is written")  # fmt: skip
    command.add_argument("--keys", type=int, metavar="N", help="key channels a head to keep")
    command.add_argument("--values", type=int, metavar="N", help="value channels a head to keep")
    command.add_argument("--target", choices=["kq", "k", "q"],
                         help="judge key channels by keys and queries, or by one of them; the "
                         "method's own choice if not given, mostly kq")  # fmt: skip
    command.add_argument("--text", type=Path, help="calibration text: .jsonl, .txt (.xz .gz .zst), "
                         "a data set's folder; if not given, the prose of the installed "
                         "Python packages")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of the order of the text, the "
                         "sample of rows and what rand draws; %(default)s")  # fmt: skip
    command.add_argument("--round-to", type=int, metavar="N",
                         help="with --ratio, keep a multiple of N channels, rounding up; 16 is "
                         "fast. With --state, compare multiples of N alone (of 16, or of less "
                         "where those are too few)")  # fmt: skip
    command.add_argument("--for", dest="engine", metavar="ENGINE",
                         help="keep numbers of channels that this engine computes right, with "
                         "--ratio rounding up, and say how to start it: "
                         f"{', '.join(ENGINES)}")  # fmt: skip
    command.add_argument(
        "--sequences", type=int, default=128, help="calibration sequences; %(default)s"
    )
    command.add_argument(
        "--length", type=int, default=2048, help="tokens in a sequence; %(default)s"
    )
    command.add_argument(
        "--rows", type=int, default=5000, help="tokens in the sample of drrqr, qrcp; %(default)s"
    )
    command.add_argument("--batch", type=int, default=8, help="sequences in a batch; %(default)s")
    command.add_argument("--refit", action=argparse.BooleanOptionalAction,
                         help="fit what is linear behind each delta rule again, in closed form, on "
                         "the same text; every method then needs text; --state needs it, else "
                         f"{'--refit' if REFIT else '--no-refit'} by default")  # fmt: skip
    command.add_argument("--eps", choices=get_args(Eps), default="matched",
                         help="of the output norms: matched makes the cut model compute what the "
                         "unpruned one does with the cut channels set to zero; kept leaves it, as "
                         "the paper's code does; %(default)s")  # fmt: skip
    command.add_argument("--dtype", choices=["bfloat16", "float32", "float16"],
                         help="of the weights that are written; the model's own if not given, but "
                         "bfloat16 for a float32 DeltaNet, whose kernel refuses it")  # fmt: skip
    command.add_argument("--device", help="cuda or cpu; the GPU if there is one")
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    for option in dict.fromkeys(option for m in METHODS.values() for option in m.takes):
        takers = ", ".join(m.name for m in METHODS.values() if option in m.takes)
        command.add_argument(option.flag, type=type(option.default), choices=option.choices or None,
                             dest=f"option.{option.name}", default=argparse.SUPPRESS,
                             metavar=None if option.choices else option.name.upper(),
                             help=f"of {takers}: {option.help}; {option.default}")  # fmt: skip

    def run(options: argparse.Namespace) -> None:
        import torch

        from keycut.prune import Request, prune

        request = Request(
            model=model_folder(options.model),
            out=options.out,
            method=options.method,
            ratio=options.ratio,
            state=options.state,
            keys=options.keys,
            values=options.values,
            target=options.target,
            text=options.text,
            seed=options.seed,
            options={key[7:]: v for key, v in vars(options).items() if key[:7] == "option."},
            sequences=options.sequences,
            length=options.length,
            sample_rows=options.rows,
            batch=options.batch,
            round_to=options.round_to,
            engine=options.engine,
            refit=options.refit,
            eps=options.eps,
            dtype=options.dtype and getattr(torch, options.dtype),
            device=_device(options.device),
            force=options.force,
        )
        print(*prune(request), sep="\n")

    command.set_defaults(run=run)


def _inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "inspect",
        help="say what is in a model, and what pruning it would save",
        description="Layers, heads and widths of a model, the state of a sequence and its share of "
        "all cache, what is saved by which ratio, and which engines compute the result right. "
        "Reads config.json and the headers of the weights' files.",
    )
    command.add_argument("model", metavar="MODEL", help="a model folder, or a downloaded hub name")
    command.add_argument("--json", type=Path, metavar="FILE", help="write it there too")

    def run(options: argparse.Namespace) -> None:
        from keycut.artefact import check_writable, write_json
        from keycut.inspection import inspect

        if options.json:
            check_writable(options.json)
        inspection = inspect(model_folder(options.model))
        if options.json:
            write_json(options.json, asdict(inspection))
        print(*inspection.lines(), sep="\n")

    command.set_defaults(run=run)


def _recover(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "recover",
        help="train a pruned model to make up for what it lost",
        description="Train low-rank adapters and the convolutions of a pruned model on text and on "
        "what the model it was cut from predicts, merge them, and write the model. The same "
        "command goes on where it was killed. Defaults are the paper's.",
    )
    command.add_argument("model", metavar="MODEL", help="the pruned model, refitted or not: a "
                         "folder, or a downloaded hub name")  # fmt: skip
    command.add_argument("teacher", metavar="TEACHER", help="the model that it was cut from")
    command.add_argument("out", metavar="OUT", type=Path, help="folder to write; checkpoints are "
                         "in OUT.checkpoints until it is written")  # fmt: skip
    command.add_argument("--text", type=Path, help="to train on: .jsonl, .txt (.xz .gz .zst), a "
                         "data set's folder; by default the packages' own prose")  # fmt: skip
    command.add_argument("--steps", type=int, default=2000, help="of training; %(default)s")
    command.add_argument("--batch", type=int, default=16, help="sequences in a step; %(default)s")
    command.add_argument("--parts", type=int, default=2, help="take a step's sequences in so many "
                         "parts: more need less memory; %(default)s")  # fmt: skip
    command.add_argument("--length", type=int, default=2048, help="tokens in each; %(default)s")
    command.add_argument("--epochs", type=int, default=1, help="passes over the text: more need "
                         "less of it; %(default)s")  # fmt: skip
    command.add_argument("--learning-rate", type=float, default=1e-4, help="peak; %(default)s")
    command.add_argument("--seed", type=int, default=42, help="of adapters and the text's order; "
                         "%(default)s")  # fmt: skip
    command.add_argument("--device", help="cuda or cpu; the GPU if there is one")
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")

    def run(options: argparse.Namespace) -> None:
        from keycut.recover import recover_folder

        lines = recover_folder(
            model_folder(options.model),
            model_folder(options.teacher),
            options.out,
            text=options.text,
            steps=options.steps,
            batch=options.batch,
            parts=options.parts,
            length=options.length,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            seed=options.seed,
            device=_device(options.device),
            force=options.force,
        )
        print(*lines, sep="\n")

    command.set_defaults(run=run, workflow=True)


def _device(name: str | None) -> str:
    """The device of that name; without one the GPU, or the CPU where there is none."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        devices = "cpu or cuda" if torch.cuda.is_available() else "cpu, there is no GPU"
        raise InputError(f"--device {name}: give {devices}")
    return name


def _check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "check",
        help="check a configuration, and whether a Slurm cluster can run it",
        description="Read a configuration, say every mistake in it, and what it still needs. With "
        "a profile for Slurm, ask the cluster which requests it can never meet. Exits with 2 for a "
        "mistake, and with 1 if something is missing or a request can never be met.",
    )
    command.add_argument("config", type=Path, metavar="FILE", nargs="?",
                         help="a configuration; the profile's if not given")  # fmt: skip
    command.add_argument("--profile", help="profile of snakemake, as profiles/slurm")

    def run(options: argparse.Namespace) -> None:
        from keycut.config import load_config
        from keycut.config.needs import hub_sources, without_trainer
        from keycut.evaluation.protocol import check_protocol
        from keycut.models.adoption import check_model_sizes
        from keycut.running.inputs import Inputs
        from keycut.running.slurm_check import profile_config, unmet_requests

        if options.config is None:
            options.config = profile_config(options.profile)
        config = load_config(options.config)
        check_protocol(config.evaluation)
        check_model_sizes(config)
        print(
            f"{options.config}: {len(config.models)} models, {len(config.methods)} methods, "
            f"{len(config.variants())} variants, {len(config.tables)} tables, "
            f"{len(config.figures)} figures"
        )
        missing = []
        for item in hub_sources(config):
            try:
                DOWNLOADS.resolve(*item.key, revision=item.revision, patterns=item.patterns)
            except InputError as error:
                # No mistake in the configuration: it may be checked before anything is fetched.
                missing.append(str(error))
        missing += [f"{file} is not there" for file in Inputs(config).missing()]
        if names := without_trainer(config):
            trains = ", ".join(names)
            missing.append(f"flame is not installed here (`make flame`), and trains {trains}")
        for line in missing:
            print(line, flush=True)
        unmet: list[str] = []
        if options.profile is not None:
            logger.info("%s: asking Slurm, and Snakemake for its jobs", options.profile)
            rules, unmet = unmet_requests(options.profile, options.config)
            print(*unmet or [f"every request of {rules} rules can be met"], sep="\n")
        if missing or unmet:
            raise SystemExit(1)

    command.set_defaults(run=run, workflow=True)


def _preflight(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "preflight",
        help="check on this GPU which shapes can be trained",
        description="Forward and backward of the delta rules against an fp32 recurrence, then "
        "whole layers, each shape in a process of its own. Keys whose width does not train are "
        "padded to the next that does; exits 1 if there is none.",
    )
    command.add_argument("--configfile", type=Path, help="check every shape that this run trains")
    command.add_argument("--kernel", help="the delta rule, as delta_net; with --widths")
    command.add_argument("--widths", metavar="N,N,...", help="key channels per head")
    command.add_argument("--heads", type=int, metavar="N",
                         help="heads of keys (as published models have)")  # fmt: skip
    command.add_argument("--value-heads", type=int, metavar="N",
                         help="heads of values (as many as of keys)")  # fmt: skip
    command.add_argument("--value-width", type=int, metavar="N",
                         help="value channels per head (as published models have)")  # fmt: skip
    command.add_argument("--json", type=Path, metavar="DIR",
                         help="write SHAPE.json for each there")  # fmt: skip
    command.add_argument("--limit", type=float, default=900.0, metavar="S",
                         help="seconds for one shape (%(default)g)")  # fmt: skip
    command.add_argument("--jobs", type=int, default=1, metavar="N",
                         help="shapes at a time: most of the work is compiling")  # fmt: skip

    def run(options: argparse.Namespace) -> None:
        import torch

        from keycut.artefact import check_writable, write_json
        from keycut.benchmarking import preflight

        if options.jobs < 1 or not options.limit > 0:
            raise InputError("--jobs must be 1 or more, and --limit more than 0")
        shapes, settings = preflight.requested_shapes(
            configfile=options.configfile,
            kernel=options.kernel,
            widths=options.widths,
            heads=options.heads,
            value_heads=options.value_heads,
            value_width=options.value_width,
        )
        if options.json is not None:
            for shape in shapes:
                check_writable(options.json / f"{shape.name}.json")
        gpu = torch.cuda.is_available()
        print(torch.cuda.get_device_name() if gpu else "no GPU: checking plain PyTorch on a CPU")
        print(preflight.TABLE_HEAD, flush=True)
        verdicts = preflight.check_shapes(
            shapes, settings, limit_s=options.limit, jobs=options.jobs
        )
        all_train = True
        for verdict in verdicts:
            print(preflight.table_row(verdict), flush=True)
            if options.json is not None:
                write_json(options.json / f"{verdict.shape.name}.json", asdict(verdict))
            all_train &= verdict.trainable
        if not all_train:
            raise SystemExit(1)

    command.set_defaults(run=run)


def _plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="say what a run costs: jobs, GPU hours, days, disk",
        description="Ask Snakemake for the jobs behind some targets and say what they cost, rule "
        "by rule, without running any. Run it in the checkout.",
    )
    command.add_argument("targets", nargs="*", metavar="TARGET",
                         help="files or target rules; everything if none is given")  # fmt: skip
    command.add_argument(
        "--configfile", type=Path, help="the profile's, or the demo's, if not given"
    )
    command.add_argument("--profile", help="profile of snakemake, as profiles/slurm")
    command.add_argument("--gpus", type=int, metavar="N", help="how many GPUs there are; if not "
                         "given, the profile's number, or a choice of several")  # fmt: skip
    command.add_argument("--costs", type=Path, default=Path("config/costs.yaml"), metavar="FILE",
                         help="measured figures (%(default)s)")  # fmt: skip
    command.add_argument("--json", type=Path, metavar="FILE", help="write the plan there too")
    command.add_argument("--after", action="store_true",
                         help="compare the plan with what finished jobs took")  # fmt: skip
    command.add_argument("--figures", type=Path, metavar="FILE", help="with --after: write what "
                         "was measured, in the form of the costs")  # fmt: skip

    def run(options: argparse.Namespace) -> None:
        from keycut.artefact import check_writable, write_json
        from keycut.config.section import check_counts
        from keycut.plan.after import compare, comparison_text, finished_jobs, write_figures
        from keycut.plan.costs import read_costs
        from keycut.plan.graph import read_graph
        from keycut.plan.planning import make_plan, price, to_text

        check_counts(gpus=options.gpus)
        if options.figures and not options.after:
            raise InputError("--figures is of jobs that have run: give --after with it")
        for path in filter(None, (options.json, options.figures)):
            check_writable(path)
        costs = read_costs(options.costs)
        logger.info("asking Snakemake for its jobs")
        graph = read_graph(options.targets, configfile=options.configfile, profile=options.profile)
        data: object
        if options.after:
            finished = finished_jobs(graph.config.run, price(graph, costs))
            text, data = comparison_text(graph.config.run, finished), compare(finished)
            if options.figures:
                write_figures(options.figures, graph.config.run, finished)
        else:
            plan = make_plan(graph, costs, targets=options.targets, gpus=options.gpus)
            text, data = to_text(plan), plan
        if options.json:
            write_json(options.json, data)
        print(text, end="")

    command.set_defaults(run=run, workflow=True)


def _compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "compare",
        help="print the verdict of a run: its numbers against the paper's",
        description="Print the verdict of a finished run: which claims of the paper hold in it, "
        "and which of its numbers lie outside of their tolerance.",
    )
    command.add_argument(
        "name", metavar="RUN", help="name of the run, whose results are in results/RUN"
    )

    def run(options: argparse.Namespace) -> None:
        from keycut.errors import nearest

        verdict = Path("results") / options.name / "verdict"
        text = verdict / "verdict.txt"
        if text.is_file():
            print(text.read_text(), end="")
            return
        if not verdict.parent.is_dir():
            known = [folder.name for folder in Path("results").glob("*/")]
            hint = nearest(options.name, known) if known else "; run this in the checkout"
            raise InputError(f"run {options.name!r}: there is no folder {verdict.parent}{hint}")
        raise InputError(
            f"{verdict} is not there yet: `snakemake {verdict}`, with the configuration or the "
            "profile of this run, makes it"
        )

    command.set_defaults(run=run)


def _download(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "download",
        help="fetch what a configuration needs from the hub",
        description="Fetch models, tokenizers and data sets at pinned commits, convert pickled "
        f"weights, and write commits and hashes to {DOWNLOADS.lock}. Goes on where it was cut "
        "off. Then look into all of it, print what is there, and exit with 2 if something is not "
        "what the run needs.",
    )
    command.add_argument("--configfile", type=Path, help="fetch all that this run needs")
    command.add_argument("--model", action="append", default=[], metavar="OWNER/NAME",
                         help="fetch this model (may be repeated)")  # fmt: skip
    command.add_argument("--update", action="append", default=[], metavar="NAME",
                         help="of this model or data set, take the newest commit of its branch, "
                         "not the locked one (may be repeated)")  # fmt: skip

    def run(options: argparse.Namespace) -> None:
        from keycut.config import load_config
        from keycut.config.needs import hub_sources
        from keycut.hub.check import download_and_check

        if options.configfile is None and not options.model:
            raise InputError("nothing to download: give --configfile or --model")
        config = load_config(options.configfile) if options.configfile is not None else None
        if config and not hub_sources(config):
            print(f"{options.configfile}: needs nothing from the hub")
        report = download_and_check(config, options.model, update=options.update)
        if report.findings:
            print(report.table())
        report.raise_problems()

    command.set_defaults(run=run, workflow=True)


def _pack(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "pack",
        help="turn text into a packed token file",
        description="Tokenize text into sequences of one length: OUT/tokens.bin and its manifest.",
    )
    command.add_argument("text", type=Path, metavar="TEXT",
                         help=".jsonl, .txt (.xz .gz .zst) or a data set folder")  # fmt: skip
    command.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    command.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    command.add_argument("--length", type=int, default=2048, help="tokens in a sequence")
    command.add_argument(
        "--sequences", type=int, help="how many; all that the text gives if absent"
    )
    command.add_argument("--field", default="text", help="the field of a record that is the text")
    command.add_argument("--seed", type=int, default=0, help="of the order of documents")
    command.add_argument(
        "--workers", type=int, default=1, help="threads; any number gives the same"
    )
    command.add_argument("--force", action="store_true", help="replace OUT if it exists")

    def run(options: argparse.Namespace) -> None:
        from keycut.artefact import check_not_overwriting, check_output_path
        from keycut.config.section import check_counts, check_seed
        from keycut.data.packing import pack
        from keycut.data.sources import describe, read
        from keycut.data.tokenizer import load_tokenizer

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
