"""What a cluster can never run, judged from what scontrol 22.05 said of one: a partition of two
hours without GPUs (32 cores, 64 GB), the default, and one of a day with two nodes of four H100."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.cli import main
from reproduction.running import slurm_check
from reproduction.running.cluster import (
    SlurmRequest,
    judge,
    parse_cluster,
    parse_sbatch,
    to_minutes,
)
from reproduction.running.slurm_check import Profile, Submission, findings
from statecut.errors import InputError

SAID = Path(__file__).parent / "slurm"
PARTITIONS, NODES = (
    (SAID / f"scontrol_{what}.txt").read_text() for what in ("partitions", "nodes")
)
CLUSTER = parse_cluster(PARTITIONS, NODES)
SMALL = SlurmRequest(("gpu",), minutes=60, memory_mb=16000, cpus=8, gpus=1, gpu_kind="")
PROFILE = """\
default-resources:
  nodes: 1
set-resources:
  pretrain: {mem_mb: 128000 * attempt, runtime: 1440}
  tokens:
    mem_mb: 16000 * attempt
    runtime: 720 * attempt
"""


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A profile, in the working directory; Slurm itself has nothing against any request."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_check, "refusals", lambda command: [])
    Path("config.yaml").write_text(PROFILE)
    return Profile(Path("config.yaml"))


def asked(rule, command, attempt=1, **by):
    return Submission(rule, attempt, f"sbatch --parsable --nodes=1 --requeue {command}", **by)


def test_the_cluster_is_read():
    assert list(CLUSTER) == ["cpu", "gpu"]
    assert [one.default for one in CLUSTER.values()] == [True, False]
    assert [one.minutes for one in CLUSTER.values()] == [120, 1440]
    assert CLUSTER["cpu"].most() == (0, 32, 64000)
    assert CLUSTER["gpu"].most() == CLUSTER["gpu"].most("h100") == (4, 64, 500000)
    assert CLUSTER["gpu"].most("a100")[0] == 0
    assert [len(one.nodes) for one in CLUSTER.values()] == [1, 2]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:a100:2(S:0,2),gpu:1g.10gb:7(S:1),shard:16", {"a100": 2, "1g.10gb": 7}),
        ("craynetwork:4,gpu:h100:4", {"h100": 4}),
        ("mygpu:3", {}),
    ],
)
def test_gpus_of_a_node(gres, gpus):
    (node,) = parse_cluster(PARTITIONS, NODES.splitlines()[1].replace("gpu:h100:4", gres))[
        "gpu"
    ].nodes
    assert node.gpus == gpus


def test_limits_of_a_partition_and_what_slurm_keeps_of_a_node():
    said = PARTITIONS.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=32000")
    said = said.replace("MaxCPUsPerNode=UNLIMITED", "MaxCPUsPerNode=16")
    assert parse_cluster(said, NODES)["cpu"].most() == (0, 16, 32000)
    kept = NODES.replace("CPUEfctv=32", "CPUEfctv=30").replace(
        "RealMemory=64000", "RealMemory=64000 MemSpecLimit=4000"
    )
    assert parse_cluster(PARTITIONS, kept)["cpu"].most() == (0, 30, 60000)


@given(st.integers(0, 30), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_times_of_slurm(days, hours, minutes, seconds):
    whole = 1440 * days + 60 * hours + minutes
    assert to_minutes(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == whole + seconds / 60
    assert to_minutes(f"{days}-{hours:02}") == 1440 * days + 60 * hours
    assert to_minutes(f"{hours}:{minutes:02}:{seconds:02}") == pytest.approx(
        60 * hours + minutes + seconds / 60
    )
    assert to_minutes(f"{minutes}:{seconds:02}") == pytest.approx(minutes + seconds / 60)
    assert to_minutes(str(whole)) == whole


def test_no_limit_is_no_limit():
    assert to_minutes("UNLIMITED") == to_minutes("INFINITE") == inf


@pytest.mark.parametrize(
    ("command", "request_"),
    [
        ("-p cpu -t 720 --mem 16000 --nodes=1 --ntasks=1 --cpus-per-task=16",
         SlurmRequest(("cpu",), 720, 16000, 16, 0, "")),
        ("-t 1440 --mem 128000 --nodes=1 --cpus-per-gpu=8 --gpus=h100:8",
         SlurmRequest((), 1440, 128000, 64, 8, "h100", cpus_by_gpu=True)),
        ("-p a,b --mem-per-cpu 2000 --cpus-per-task=4",
         SlurmRequest(("a", "b"), 0, 8000, 4, 0, "")),
        # Slurm spreads what does not say on how many nodes it is to be.
        ("--gpus=8", SlurmRequest((), 0, 0, 1, 1, "")),
        ("--nodes=2 --gpus=8", SlurmRequest((), 0, 0, 1, 4, "")),
    ],
)  # fmt: skip
def test_what_is_asked_is_read_from_the_command(command, request_):
    assert parse_sbatch(f"sbatch --parsable --job-name x -A me {command} -D /here") == request_


@pytest.mark.parametrize(
    ("change", "key", "limit"),
    [
        ({"minutes": 1441}, "runtime", "1440"),
        ({"memory_mb": 500001}, "mem_mb", "500000"),
        ({"cpus": 65}, "threads", "64"),
        ({"cpus": 72, "gpus": 4, "cpus_by_gpu": True}, "cpus_per_gpu", "16"),
        ({"gpus": 5}, "gpu", "4"),
        # Four GPUs bring no more cores than there are.
        ({"gpus": 8, "cpus": 128, "cpus_by_gpu": True}, "gpu", "4"),
        ({"gpu_kind": "a100"}, "gpu_model", '"h100"'),
        ({"partitions": ("cpu",)}, "slurm_partition", ""),
        ({"partitions": ()}, "slurm_partition", ""),  # the default
        ({"partitions": ("gpuu",)}, "slurm_partition", ""),
        ({"partitions": ("cpu", "gpu"), "minutes": 1441}, "runtime", "1440"),
    ],
)
def test_one_resource_too_much(change, key, limit):
    (problem,) = judge(replace(SMALL, **change), CLUSTER)
    assert (problem.key, problem.limit) == (key, limit)


@given(st.floats(0, 1440), st.integers(0, 500000), st.integers(1, 64), st.integers(0, 4),
       st.sampled_from(["", "h100"]))  # fmt: skip
def test_all_that_a_node_has_can_be_had(minutes, memory, cpus, gpus, kind):
    assert judge(SlurmRequest(("gpu",), minutes, memory, cpus, gpus, kind), CLUSTER) == []
    assert judge(SlurmRequest(("cpu", "gpu"), minutes, memory, cpus, gpus, kind), CLUSTER) == []


def test_no_node_has_all_of_it():
    two = parse_cluster(
        PARTITIONS, NODES.replace("Gres=gpu:h100:4", "Gres=gpu:h100:2", 1).replace(
            "CPUEfctv=64", "CPUEfctv=16", 2).replace("CPUEfctv=16", "CPUEfctv=64", 1)
    )  # fmt: skip
    assert two["gpu"].most() == (4, 64, 500000)
    (problem,) = judge(replace(SMALL, gpus=4, cpus=64), two)
    assert "together, which no node of partition gpu has" in problem.text


@pytest.mark.parametrize("state", ["DOWN", "DRAIN", "INACTIVE"])
def test_a_partition_that_does_not_start_jobs(state):
    down = parse_cluster(PARTITIONS.replace("State=UP", f"State={state}"), NODES)
    assert [one.text for one in judge(SMALL, down)] == [f"partition gpu is {state}"]


def test_the_line_to_change_is_named(profile):
    asks = [asked("tokens", "-t 720"), asked("tokens", "-t 1440", 2)]
    assert findings(asks, CLUSTER, profile) == [
        "config.yaml:7: tokens: asks for 12 h, partition cpu allows 2 h; write runtime: 120 (if "
        "that is enough), or slurm_partition: gpu"
    ]


def test_a_later_attempt_alone_is_said_as_such(profile):
    asks = [asked("tokens", f"-t 60 --mem {16000 * n}", n) for n in (1, 2, 3, 4, 5)]
    assert findings(asks, CLUSTER, profile) == [
        "config.yaml:6: tokens: attempt 5 asks for 80 GB, a node of partition cpu has 64 GB; "
        'write mem_mb: "min(16000 * attempt, 64000)" (if that is enough), or slurm_partition: gpu'
    ]


def test_what_goes_on_in_the_queue_needs_no_more_time(profile):
    (line,) = findings([asked("pretrain", "-p gpu -t 2880 --gpus=4")], CLUSTER, profile)
    assert line.startswith("config.yaml:4: pretrain: asks for 48 h, partition gpu allows 24 h")
    assert line.endswith("write runtime: 1440 (it is requeued to go on)")


def test_a_wrong_partition_hides_nothing_of_the_right_one(profile):
    (line,) = findings([asked("pretrain", "-t 1440 --gpus=8")], CLUSTER, profile)
    assert line == (
        "config.yaml:4: pretrain: asks for 8 GPUs, partition cpu has none; nor can gpu: asks for "
        "8 GPUs, a node of partition gpu has 4; write slurm_partition: gpu, gpu: 4"
    )


def test_rules_with_the_same_line_are_said_together(profile):
    Path("config.yaml").write_text("default-resources:\n  slurm_partition: gpuu\n")
    asks = [asked(rule, "-p gpuu -t 5 --gpus=1") for rule in ("evaluate", "analyze")]
    assert findings(asks, CLUSTER, Profile(Path("config.yaml"))) == [
        "config.yaml:2: analyze, evaluate: there is no partition gpuu, only cpu, gpu; write "
        "slurm_partition: gpu"
    ]


def test_a_rule_that_has_to_move_is_not_told_to_move_all(profile):
    Path("config.yaml").write_text(
        "default-resources:\n  slurm_partition: cpu\nset-resources:\n  evaluate: {mem_mb: 1}\n"
    )
    (line,) = findings([asked("evaluate", "-p cpu --gpus=1")], CLUSTER, Profile(profile.file))
    assert line.startswith("config.yaml:4: evaluate: asks for 1 GPU, partition cpu has none")


def test_the_file_of_partitions_is_named_where_it_promised_too_much(profile):
    Path("mine.yaml").write_text("partitions:\n  cpu:\n    max_runtime: 2880\n")
    files = Profile(profile.file, Path("mine.yaml"))
    assert findings([asked("tokens", "-p cpu -t 720", by_file=True)], CLUSTER, files) == [
        "mine.yaml:3: tokens: asks for 12 h, partition cpu allows 2 h; write max_runtime: 120"
    ]


def test_a_partition_is_offered_only_if_it_meets_every_attempt(profile):
    short = replace(CLUSTER["gpu"], name="short", minutes=480)
    hidden = replace(CLUSTER["gpu"], name="hidden", hidden=True)
    asks = [asked("evaluate", f"-p cpu --gpus=1 -t {240 * n}", n) for n in (1, 2, 3)]
    (line,) = findings(asks, {**CLUSTER, "short": short, "hidden": hidden}, profile)
    assert line.endswith("write slurm_partition: gpu")


def test_cores_are_set_where_snakemake_takes_them_from(profile):
    (line,) = findings([asked("tokens", "-p gpu -t 5 --cpus-per-task=80")], CLUSTER, profile)
    assert "asks for 80 cores, a node of partition gpu has 64" in line
    assert line.endswith("write set-threads: {tokens: 64}")


def test_a_partition_without_nodes_is_named():
    empty = replace(CLUSTER["gpu"], nodes=())
    (problem,) = judge(SMALL, {"gpu": empty})
    assert problem.text == "partition gpu has no nodes"


def test_where_a_job_goes_wherever_it_fits_the_longest_partition_counts(profile):
    Path("mine.yaml").write_text("partitions:\n  cpu: {}\n")
    (line,) = findings(
        [asked("tokens", "-t 2160", 3)], CLUSTER, Profile(profile.file, Path("mine.yaml"))
    )
    assert 'write runtime: "min(720 * attempt, 1440)"' in line


@pytest.mark.parametrize(
    ("said", "code", "key"),
    [
        ("sbatch: Job 7 to start at 2026-11-16T04:45:26", 0, None),
        ("allocation failure: Invalid account or account/partition combination specified", 1,
         "slurm_account"),
        ("allocation failure: Invalid qos specification", 1, "qos"),
        ("allocation failure: QOSMaxWallDurationPerJobLimit: Job violates accounting/QOS policy", 1,
         "runtime"),
        ("allocation failure: QOSMaxCpuPerJobLimit: Job violates accounting/QOS policy", 1, "qos"),
        ("allocation failure: Invalid feature specification", 1, "constraint"),
        # As Slurm says while nodes are drained, which may pass.
        ("allocation failure: Requested node configuration is not available", 1, None),
        ("Slurm temporarily unable to accept job", 1, None),
    ],
)  # fmt: skip
def test_slurm_is_asked_about_what_cannot_be_read(tmp_path, monkeypatch, said, code, key):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {code}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm_check.refusals.cache_clear()
    assert [one.key for one in slurm_check.refusals("sbatch -t 1")] == ([key] if key else [])


def test_what_slurm_refuses_is_said_in_its_words_with_the_line(profile, monkeypatch):
    Path("config.yaml").write_text("default-resources:\n  slurm_account: foo\n")
    problem = slurm_check.Problem("slurm_account", "sbatch refuses it: Invalid account")
    monkeypatch.setattr(slurm_check, "refusals", lambda command: [problem])
    asks = [asked(rule, "-A foo -t 5") for rule in ("score", "slice")]
    assert findings(asks, CLUSTER, Profile(profile.file)) == [
        "config.yaml:2: score, slice: sbatch refuses it: Invalid account"
    ]


def test_without_slurm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"no scontrol here: check .* on the cluster's login node"):
        slurm_check.read_cluster()


def test_nothing_to_check_is_refused(capsys):
    assert main(["check"]) == 2
    assert "give a configuration's FILE or --profile" in capsys.readouterr().err


def test_a_profile_that_is_not_there_is_named(capsys):
    assert main(["check", "--profile", "profiles/slrm"]) == 2
    assert (
        "profile 'profiles/slrm': no folder with a config.yaml; did you mean"
        in capsys.readouterr().err
    )
