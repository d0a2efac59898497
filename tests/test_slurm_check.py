"""What a cluster can never run, judged from what scontrol 22.05 said of one: a partition of two
hours without GPUs (32 cores, 64 GB), the default, and one of a day with two nodes of four H100."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction import slurm_check
from reproduction.cli import main
from reproduction.slurm_check import (
    Node,
    Request,
    findings,
    judge,
    parse_cluster,
    read_cluster,
)
from statecut.errors import InputError

PRINTED = Path(__file__).parent / "slurm"
PARTITIONS, NODES = (
    (PRINTED / f"scontrol_{what}.txt").read_text() for what in ("partitions", "nodes")
)
CLUSTER = parse_cluster(PARTITIONS, NODES)


@pytest.fixture
def no_refusals(monkeypatch):
    """Slurm itself has nothing against any request."""
    monkeypatch.setattr(slurm_check, "refusals", lambda command: [])


def asked(command, rule="tokens", attempt=1):
    return Request(rule, attempt, f"sbatch --parsable --nodes=1 --requeue {command}")


def test_the_cluster_is_read():
    cpu, gpu = CLUSTER.values()
    assert (cpu.name, cpu.default, cpu.minutes) == ("cpu", True, 120)
    assert (gpu.name, gpu.default, gpu.minutes) == ("gpu", False, 1440)
    assert cpu.nodes == (Node(32, 64000, {}),)
    assert gpu.nodes == (Node(64, 500000, {"h100": 4}),) * 2


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
    limited = PARTITIONS.replace("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=32000")
    limited = limited.replace("MaxCPUsPerNode=UNLIMITED", "MaxCPUsPerNode=16")
    assert parse_cluster(limited, NODES)["cpu"].nodes == (Node(16, 32000, {}),)
    kept = NODES.replace("CPUEfctv=32", "CPUEfctv=30").replace(
        "RealMemory=64000", "RealMemory=64000 MemSpecLimit=4000"
    )
    assert parse_cluster(PARTITIONS, kept)["cpu"].nodes == (Node(30, 60000, {}),)


@pytest.mark.parametrize(
    ("command", "key", "why"),
    [
        ("-p gpu -t 1441", "runtime", "asks for 24 h, partition gpu allows 24 h"),
        ("-p gpu --mem 600000", "mem_mb", "asks for 600 GB, a node of partition gpu has 500 GB"),
        ("-p gpu --cpus-per-task=5 --mem-per-cpu 120000", "mem_mb", "asks for 600 GB"),
        ("-p gpu --cpus-per-task=65", "set-threads", "asks for 65 cores, a node of partition gpu"),
        ("-p gpu --cpus-per-gpu=18 --gpus=4", "cpus_per_gpu", "asks for 72 cores"),
        ("-p gpu --gpus=5", "gpu", "asks for 5 GPUs, a node of partition gpu has 4"),
        # Four GPUs bring no more cores than there are.
        ("-p gpu --cpus-per-gpu=16 --gpus=8", "gpu", "asks for 8 GPUs"),
        ("-p gpu --gpus=a100:1", "gpu_model", "of kind a100, partition gpu has h100"),
        ("-p cpu --gpus=h100:1", "gpu", "asks for 1 GPU, partition cpu has none"),
        ("--gpus=1", "gpu", "asks for 1 GPU, partition cpu has none"),  # the default
        ("-p gpuu", "slurm_partition", "there is no partition 'gpuu', only cpu, gpu"),
        ("-p cpu,gpu -t 1441", "runtime", "partition cpu allows 2 h"),
    ],
)  # fmt: skip
def test_one_resource_too_much(command, key, why):
    ((found, text),) = judge(asked(command), CLUSTER)
    assert found == key
    assert why in text


@given(st.integers(0, 1440), st.integers(0, 500000), st.integers(1, 64), st.integers(0, 4),
       st.sampled_from(["", "h100:"]), st.sampled_from(["gpu", "cpu,gpu"]))  # fmt: skip
def test_all_that_a_node_has_can_be_had(minutes, memory, cpus, gpus, kind, partition):
    command = (
        f"-p {partition} -t {minutes} --mem {memory} --cpus-per-task={cpus} --gpus={kind}{gpus}"
    )
    assert judge(asked(command), CLUSTER) == []


def test_slurm_spreads_what_does_not_say_on_how_many_nodes_it_is_to_be():
    assert judge(Request("pretrain", 1, "sbatch -p gpu --gpus=8"), CLUSTER) == []
    assert judge(Request("pretrain", 1, "sbatch -p gpu --nodes=2 --gpus=8"), CLUSTER) == []


@pytest.mark.parametrize("state", ["DOWN", "DRAIN", "INACTIVE"])
def test_a_partition_that_does_not_start_jobs(state):
    down = parse_cluster(PARTITIONS.replace("State=UP", f"State={state}"), NODES)
    assert judge(asked("-p gpu"), down) == [("slurm_partition", f"partition gpu is {state}")]
    empty = CLUSTER["gpu"]._replace(nodes=())
    assert judge(asked("-p gpu"), {"gpu": empty})[0][1] == "partition gpu has no nodes"


@pytest.mark.parametrize(
    ("limit", "command", "taken"),
    [
        ("AllowAccounts=ALL", "", True),
        ("AllowAccounts=paid,toy", "-A toy", True),
        ("AllowAccounts=toy", "-A mine", False),
        ("AllowAccounts=toy", "", False),
        ("DenyAccounts=mine", "", False),
        ("DenyAccounts=mine", "-A toy", True),
    ],
)
def test_an_account_that_a_partition_does_not_take(monkeypatch, limit, command, taken):
    monkeypatch.setattr(slurm_check, "default_account", lambda: "mine")
    cluster = parse_cluster(PARTITIONS.replace("AllowAccounts=ALL", limit), NODES)
    problem = ("slurm_account", "partition gpu takes no jobs of account mine")
    assert judge(asked(f"-p gpu {command}"), cluster) == [problem] * (not taken)


def test_the_default_account_is_asked_of_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm_check.default_account.cache_clear()
    assert slurm_check.default_account() == ""
    (tmp_path / "sacctmgr").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "sacctmgr").chmod(0o755)
    slurm_check.default_account.cache_clear()
    assert slurm_check.default_account() == "mine"
    slurm_check.default_account.cache_clear()


def test_rules_resource_and_first_attempt_that_asks_too_much_are_named(no_refusals):
    requests = [asked("-t 720"), asked("-t 1440", attempt=2)]
    assert findings(requests, CLUSTER) == [
        "tokens: runtime: asks for 12 h, partition cpu allows 2 h"
    ]
    requests = [asked(f"--mem {16000 * n}", attempt=n) for n in (1, 2, 3, 4, 5)]
    assert findings(requests, CLUSTER) == [
        "tokens: mem_mb: attempt 5 asks for 80 GB, a node of partition cpu has 64 GB"
    ]
    requests = [asked("-p gpuu -t 5 --gpus=1", rule) for rule in ("evaluate", "analyze")]
    assert findings(requests, CLUSTER) == [
        "analyze, evaluate: slurm_partition: there is no partition 'gpuu', only cpu, gpu"
    ]


@pytest.mark.parametrize(
    ("message", "code", "refused"),
    [
        ("sbatch: Job 7 to start at 2026-11-16T04:45:26", 0, False),
        ("Invalid account or account/partition combination specified", 1, True),
        ("QOSMaxWallDurationPerJobLimit: Job violates accounting/QOS policy", 1, True),
        # As Slurm says while nodes are drained, which may pass.
        ("Requested node configuration is not available", 1, False),
        ("Slurm temporarily unable to accept job", 1, False),
    ],
)
def test_slurm_is_asked_about_what_cannot_be_read(tmp_path, monkeypatch, message, code, refused):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{message}' >&2\nexit {code}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm_check.refusals.cache_clear()
    requests = [asked("-A foo -t 5", rule) for rule in ("score", "slice")]
    assert findings(requests, CLUSTER) == [f"score, slice: sbatch: {message}"] * refused


def test_without_slurm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"no scontrol here: check .* on the cluster's login node"):
        read_cluster()


def test_a_rule_that_is_mistyped_in_a_profile_is_named(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("set-resources:\n  recovery: {mem_mb: 1000}\n")
    assert main(["plan", "--profile", str(tmp_path)]) == 2
    assert "no rule 'recovery'; did you mean 'recover'?" in capsys.readouterr().err


def test_a_profile_that_is_not_there_is_named(capsys):
    assert main(["check", "--profile", "profiles/slrm"]) == 2
    assert "profile 'profiles/slrm': no such folder; did you mean" in capsys.readouterr().err
