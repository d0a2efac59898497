"""The command line of a run. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import csv
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from statecut import cli
from statecut.errors import InputError, nearest
from statecut.hub import LOCK, resolve
from statecut.version import __version__

logger = logging.getLogger(__name__)

REHEARSAL = "of a rehearsal: `snakemake --config rehearsal=true`"


def main(arguments: list[str] | None = None) -> int:
    return cli.run(parser(), arguments)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="reproduction",
        description="Check, price, feed and judge runs of the paper's workflow.",
    )
    top.set_defaults(install="run `make setup` in the checkout")
    top.add_argument("--version", action="version", version=f"statecut {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], about: str, description: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=description)
        added.set_defaults(run=run)
        return added

    add = command(
        "check",
        check,
        "check a configuration, and whether a Slurm cluster can run it",
        "Read a configuration, say every mistake in it, and what it still needs. With a profile "
        "for Slurm, ask the cluster which requests it can never meet. Exits with 2 for a mistake, "
        "and with 1 if something is missing or a request can never be met.",
    ).add_argument
    add(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a configuration (default: the profile's, or the demo)",
    )
    add("--profile", help="profile of snakemake, as profiles/slurm")
    add("--rehearsal", action="store_true", help=REHEARSAL)
    add = command(
        "plan",
        plan,
        "say what a run costs: jobs, GPU hours, days, disk",
        "Ask Snakemake for the jobs behind some targets and say what they cost, rule by rule, "
        "without running any. Run it in the checkout.",
    ).add_argument
    add("config", nargs="?", metavar="CONFIG",
        help="a configuration (.yaml); the profile's, or the demo's, if not given")  # fmt: skip
    add("targets", nargs="*", metavar="TARGET", help="files or target rules; if none, everything")
    add("--profile", help="profile of snakemake, as profiles/slurm")
    add("--rehearsal", action="store_true", help=REHEARSAL)
    add("--gpus", type=int, metavar="N", help="how many there are; if not given, the profile's")
    add = command(
        "jobs",
        jobs,
        "say what the jobs of a run took, and what they asked for",
        "Print seconds and memory of the finished jobs of a run by rule and model, next to the "
        "time and memory that they asked for; of a resumed job, those of its last process. "
        "Memory in a rehearsal is that of the run itself.",
    ).add_argument
    add("name", metavar="RUN", help="its name: results are in results/RUN")
    add = command(
        "compare",
        compare,
        "print the verdict of a run: its numbers against the paper's",
        "Print the verdict of a finished run: which claims of the paper hold in it, and which of "
        "its numbers lie outside of their tolerance. Exits with 1 if a number is outside, and "
        "decided.",
    ).add_argument
    add("name", metavar="RUN", help="its name: results are in results/RUN")
    add = command(
        "download",
        download,
        "fetch what a configuration needs from the hub",
        f"Fetch models, tokenizers and data sets at pinned commits, and write commits and hashes "
        f"to {LOCK}. Goes on where it was cut off. Then look into all of it, print what is there, "
        "and exit with 2 if something is not what the run needs.",
    ).add_argument
    add("config", metavar="CONFIG", help="a configuration")
    add("--update", action="append", default=[], metavar="NAME",
        help="of this model or data set, take the newest commit of its branch, not the locked one "
        "(may be repeated)")  # fmt: skip
    return top


def check(options: argparse.Namespace) -> None:
    from reproduction.config import load_config
    from reproduction.config.needs import hub_sources, without_trainer
    from reproduction.dag import parse_arguments
    from reproduction.import_model import check_model_sizes
    from reproduction.rules import Inputs
    from reproduction.slurm_check import unmet_requests
    from reproduction.suites.protocol import check_protocol

    file = options.config
    if file is None:  # as Snakemake does
        file = (parse_arguments(options.profile).configfile or ["config/demo.yaml"])[-1]
    config = load_config(file, **({"rehearsal": True} if options.rehearsal else {}))
    check_protocol(config.evaluation)
    check_model_sizes(config)
    print(
        f"{file}: {len(config.models)} models, {len(config.methods)} methods, "
        f"{len(config.variants())} variants, {len(config.tables)} tables, "
        f"{len(config.figures)} figures"
    )
    missing = []
    for item in hub_sources(config):
        try:
            resolve(*item.key, revision=item.revision, patterns=item.patterns)
        except InputError as error:
            # No mistake in the configuration: it may be checked before anything is fetched.
            missing.append(str(error))
    missing += [f"{file} is not there" for file in Inputs(config).missing()]
    if names := without_trainer(config):
        missing.append(f"flame is not installed here (`make flame`), and trains {', '.join(names)}")
    for line in missing:
        print(line, flush=True)
    unmet: list[str] = []
    if options.profile is not None:
        logger.info("%s: asking Slurm, and Snakemake for its jobs", options.profile)
        rules, unmet = unmet_requests(options.profile, file, rehearsal=options.rehearsal)
        print(*unmet or [f"every request of {rules} rules can be met"], sep="\n")
    if missing or unmet:
        raise SystemExit(1)


def plan(options: argparse.Namespace) -> None:
    from reproduction.plan import read_figures, read_graph, to_text
    from statecut.arguments import check_counts

    check_counts(gpus=options.gpus)
    config, targets = options.config, options.targets
    if config and Path(config).suffix not in (".yaml", ".yml"):
        config, targets = None, [config, *targets]
    logger.info("asking Snakemake for its jobs")
    figures = read_figures("config/costs.yaml")
    graph = read_graph(
        figures,
        targets,
        configfile=config,
        profile=options.profile,
        rehearsal=options.rehearsal,
    )
    print(to_text(graph, targets=targets, gpus=options.gpus), end="")


def jobs(options: argparse.Namespace) -> None:
    from reproduction.plan import table
    from reproduction.reporting.jobs import result_records, used_and_asked

    results = Path("results") / options.name
    records = result_records(results, left_out=frozenset())
    if not records:
        known = [folder.name for folder in Path("results").glob("*/")]
        raise InputError(f"no job has finished in {results}{nearest(options.name, known)}")
    print(*table(used_and_asked(records.values())), sep="\n")


def compare(options: argparse.Namespace) -> None:
    from reproduction.reporting.verdict import OUTSIDE

    verdict = Path("results") / options.name / "verdict"
    if not verdict.is_dir():
        known = [folder.parent.name for folder in Path("results").glob("*/verdict/")]
        raise InputError(
            f"there is no {verdict}{nearest(options.name, known)}; `snakemake {verdict}`, in "
            "the checkout with the configuration or the profile of this run, makes it"
        )
    print((verdict / "verdict.txt").read_text(), end="")
    with open(verdict / "cells.csv", newline="") as file:
        if any(row["word"] in OUTSIDE for row in csv.DictReader(file)):
            raise SystemExit(1)


def download(options: argparse.Namespace) -> None:
    from reproduction.config import load_config
    from reproduction.download import download_and_check

    table, problems = download_and_check(load_config(options.config), update=options.update)
    print(table)
    if problems:
        raise InputError(problems)


if __name__ == "__main__":
    sys.exit(main())
