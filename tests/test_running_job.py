"""What every job of the workflow does around its work."""

import errno
import json
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from reproduction.running.code import KnownCode
from reproduction.running.job import job
from reproduction.running.job_context import check_up_to_date
from reproduction.running.paths import PROVENANCE
from reproduction.running.provenance import Provenance
from statecut.errors import InputError
from statecut.files import write_json

ROOT = Path(__file__).parents[1]


class Named(list):
    """A list whose entries have names too, as Snakemake hands them to a script."""

    def __init__(self, **named):
        super().__init__(named.values())
        self.__dict__.update(named)
        self.items, self.get = named.items, named.get


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A job as Snakemake would start it, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("REPRODUCTION_FORK_SERVER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    # What the job sets for itself is put back.
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE",
                 "ONEDNN_JIT_PROFILE", "TOKENIZERS_PARALLELISM", "TRITON_CACHE_DIR"):  # fmt: skip
        monkeypatch.setenv(name, os.environ.get(name, ""))
    script = tmp_path / "work.py"
    script.write_text("from statecut.files import digest\n\ndigest(1)\n")

    def make(settings={"run": "demo", "device": "cpu"}, **inputs):  # noqa: B006
        return SimpleNamespace(
            rule="work",
            input=Named(**inputs),
            output=Named(result="out.json"),
            params=Named(code=KnownCode.of("work.py", device="cpu").to_json(), settings=settings),
            wildcards=Named(model="a"),
            log=["work.log"],
            threads=1,
            resources={},
        )

    return make


@pytest.fixture
def around(capfd):
    """The job's context, without pytest's capture between a print and the log."""

    @contextmanager
    def enter(snakemake, **options):
        with capfd.disabled(), job(snakemake, **options) as run:
            yield run

    return enter


HANDS_OVER = """
import sys
from types import SimpleNamespace
from reproduction.running import forkserver
from reproduction.running.job import job
heavy = {"pydantic", "yaml", "reproduction.config"}
forkserver.hand_over = lambda **_: sys.exit(str(heavy & {*sys.modules}))
job(SimpleNamespace(threads=1, rule="evaluate"))
"""


def test_a_script_that_hands_its_job_over_imports_only_what_that_takes():
    done = subprocess.run([sys.executable, "-c", HANDS_OVER], capture_output=True, text=True)
    assert done.stderr == "set()\n"


@pytest.mark.parametrize(
    ("rule", "stays"),
    [("evaluate", True), ("pretrain", False), ("recover", False), ("refit", False)],
)
def test_of_all_jobs_evaluations_may_share_a_process(planned, around, monkeypatch, rule, stays):
    handed_over = {}
    monkeypatch.setattr(
        "reproduction.running.forkserver.hand_over", lambda **how: handed_over.update(how)
    )
    snakemake = planned()
    snakemake.rule = rule
    with around(snakemake):
        assert handed_over == {"stays": stays}


def test_torch_leaves_nothing_in_the_temporary_folder(planned, around):
    code = (
        "import os, torch\nfrom pathlib import Path\n"
        "left = Path(f'/tmp/perf-{os.getpid()}.map')\n"
        "left.unlink(missing_ok=True)\n"  # of another process with this number
        "torch.randn(1, 3, 16, 16).to_mkldnn().to_dense()\nprint(left.exists())"
    )
    with around(planned()):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_what_is_said_goes_to_the_log_even_from_other_processes(planned, around):
    with around(planned()) as run:
        print("said")
        print("warned", file=sys.stderr)
        os.system("echo from outside")
    assert run.run == "demo"
    assert {*Path("work.log").read_text().split("\n")} == {"said", "warned", "from outside", ""}


def test_a_fault_is_in_the_log_with_its_traceback(planned, around):
    with pytest.raises(ZeroDivisionError), around(planned()):
        raise ZeroDivisionError("division by zero")
    assert "Traceback" in (log := Path("work.log").read_text())
    assert "ZeroDivisionError: division by zero" in log


def test_the_hub_is_switched_off_unless_the_job_is_to_fetch(planned, around):
    os.environ["HF_HUB_OFFLINE"] = ""
    with around(planned(), online=True):
        assert os.environ["HF_HUB_OFFLINE"] == ""
    with around(planned()):
        assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_beside_the_output_stands_where_it_came_from(planned, around):
    with around(planned(model="model.bin")):
        pass
    found = json.loads(Path("out.json.provenance.json").read_text())
    assert found["rule"] == "work"
    assert found["inputs"] == ["model.bin"]
    assert found["wildcards"] == {"model": "a"}
    assert found["code"]["modules"] == ["statecut.files"]
    assert found["versions"]["python"].startswith("3.")


def test_a_job_on_a_part_of_a_gpu_is_kept_to_that_part_of_its_memory(
    planned, around, tmp_path, monkeypatch
):
    import torch

    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(
        "reproduction.running.provenance.gpu_names", lambda count: ["a GPU"] * count
    )
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for asked in (0, 1, 4):
        part = planned({"device": "cuda"})
        part.resources = {"gpu": asked, "gpu_shares": 4}
        with around(part):
            pass
        found = json.loads(Path("out.json.provenance.json").read_text())
        assert found["gpu_share"] == asked / 4
    assert limits == [0.25]


def rules_on_a_gpu():
    text = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    rules = re.split(r"^ *rule (\w+):", text, flags=re.M)
    return [name for name, body in zip(rules[1::2], rules[2::2], strict=True) if "gpu=" in body]


# What torch is built for, the driver, what is visible, and what torch says of it.
WITHOUT_GPU = {
    "no GPU": ("13.0", None, None, "Found no NVIDIA driver on your system."),
    "a CPU build": (None, "580.65.06", "0", "Torch not compiled with CUDA enabled"),
    "a driver that is too old": ("13.0", "550.54.15", "0",
                                 "The NVIDIA driver on your system is too old (found 12040)."),
    "none visible": ("13.0", "580.65.06", "", "No CUDA GPUs are available"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_GPU)
@pytest.mark.parametrize("rule", rules_on_a_gpu())
def test_a_job_that_asks_for_a_gpu_ends_at_once_where_torch_can_use_none(
    planned, capfd, tmp_path, monkeypatch, rule, case
):
    import torch

    cuda, driver, visible, said = WITHOUT_GPU[case]

    def init():
        raise RuntimeError(f"{said}\nmore of it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("reproduction.running.gpus.driver_version", lambda: driver)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    snakemake = planned({"device": "cuda"})
    snakemake.rule, snakemake.resources = rule, {"gpu": 1}
    with pytest.raises(SystemExit) as ended, capfd.disabled():
        runpy.run_path(str(ROOT / f"scripts/{rule}.py"), {"snakemake": snakemake})
    assert ended.value.code == 2
    lines = Path("work.log").read_text().splitlines()
    built = f"built for CUDA {cuda}" if cuda else "a CPU build"
    seen = "not set" if visible is None else repr(visible)
    assert lines[:2] == [
        f"reproduction: rule {rule} asks for 1 GPU, and torch can use none: {said}",
        f"  on {platform.node()}: torch {torch.__version__}, {built}; "
        f"driver {driver or 'none found'}; CUDA_VISIBLE_DEVICES {seen}",
    ]
    assert "driver 580.65 or newer" in lines[2]
    assert "`device: cpu`" in lines[2]
    assert len(lines) == 3


def test_a_run_that_says_cpu_leaves_gpus_alone(planned, around, tmp_path, monkeypatch):
    """Triton asks torch, and torch what is visible: with nothing there, stand-ins are installed."""
    monkeypatch.setattr("reproduction.running.gpus._folder", lambda: tmp_path / "locks")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    snakemake = planned()
    snakemake.resources = {"gpu": 1}
    with around(snakemake) as run:
        assert run.device == "cpu"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert not (tmp_path / "locks").exists()
    assert json.loads(Path("out.json.provenance.json").read_text())["gpus"] == []


def test_bad_input_ends_a_job_with_its_message_alone(planned, around):
    with pytest.raises(SystemExit) as ended, around(planned()):
        raise InputError("ratio 2: must lie in (0, 1)")
    assert ended.value.code == 2
    assert Path("work.log").read_text() == "reproduction: ratio 2: must lie in (0, 1)\n"
    assert not Path("out.json.provenance.json").exists()


def test_a_full_disk_is_said_where_it_can_be_read(planned, around):
    with pytest.raises(SystemExit) as ended, around(planned()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    assert "No space left on device: 'model.safetensors': make room" in ended.value.code


def test_code_that_changed_after_the_plan_is_refused(planned, around):
    snakemake = planned()
    Path("work.py").write_text("from statecut.files import sha256\n")
    with pytest.raises(SystemExit), around(snakemake):
        raise AssertionError("the work must not begin")
    assert "was changed after this job was planned" in Path("work.log").read_text()


@pytest.mark.parametrize("present", [True, False])
def test_a_file_of_the_users_that_changed_after_the_plan_is_refused(planned, around, present):
    if present:
        Path("text.jsonl").write_text("other\n")
    snakemake = planned()
    snakemake.params = Named(**dict(snakemake.params.items()), user_files={"text.jsonl": "0" * 64})
    with pytest.raises(SystemExit), around(snakemake):
        raise AssertionError("the work must not begin")
    said = (
        "reproduction: text.jsonl was changed after this job was planned: start snakemake again\n"
    )
    assert Path("work.log").read_text() == said


def test_an_input_made_by_other_code_is_refused_but_in_a_partial_run(planned, around, capfd):
    with around(planned()):
        Path("out.json").write_text("{}")
    check_up_to_date("out.json")
    Path("work.py").write_text("from statecut.pruning.slicing import Keep\n")
    with pytest.raises(InputError, match=r"out\.json was made by other code of rule work"):
        check_up_to_date("out.json")
    check_up_to_date("out.json", partial=True)
    assert "the run is partial and keeps it" in capfd.readouterr().err


def test_an_input_is_checked_by_its_record_also_where_that_is_another_outputs(planned, around):
    with around(planned()):
        Path("out.json").write_text("{}")
    Path("second.json").write_text("{}")  # of the same job
    Path("work.py").write_text("from statecut.pruning.slicing import Keep\n")
    reader = planned(second="second.json", provenance=f"out.json{PROVENANCE}")
    reader.output = Named(result="read.json")
    with pytest.raises(SystemExit), around(reader):
        raise AssertionError("the work must not begin")
    assert "out.json was made by other code of rule work" in Path("work.log").read_text()


def test_an_input_that_no_rule_made_is_taken_as_it_is(planned):
    Path("given.txt").write_text("")
    check_up_to_date("given.txt")


def waits_for_another(monkeypatch):
    """As if another job had been at work on the outputs until now."""

    @contextmanager
    def exclusive_lock(outputs):
        yield True

    monkeypatch.setattr("reproduction.running.job_context.exclusive_lock", exclusive_lock)


def test_what_another_job_made_meanwhile_is_not_made_again(planned, around, monkeypatch):
    with around(planned()):
        Path("out.json").write_text("theirs")
    waits_for_another(monkeypatch)
    with pytest.raises(SystemExit) as left, around(planned()):
        Path("out.json").write_text("ours")
    assert left.value.code == 0
    assert Path("out.json").read_text() == "theirs"


def test_what_another_job_made_with_other_code_of_the_same_version_is_kept(
    planned, around, monkeypatch
):
    version = {"version": 1, "code": "some"}
    write_json("versions.json", {"work": {"cpu": version, "cuda": version}})
    with around(planned()):
        Path("out.json").write_text("theirs")
    Path("work.py").write_text("from statecut.pruning.slicing import Keep\n")
    waits_for_another(monkeypatch)
    with pytest.raises(SystemExit), around(planned()):
        pass
    assert Path("out.json").read_text() == "theirs"


@pytest.mark.parametrize("other", ["half", "params", "code"])
def test_what_another_job_made_otherwise_is_removed(planned, around, monkeypatch, other):
    with around(planned()):
        Path("out.json").write_text("theirs")
    beside = Path("out.json.provenance.json")
    if other == "half":
        beside.unlink()
    else:
        made = json.loads(beside.read_text())
        made["params"] = "other" if other == "params" else made["params"]
        made["code"]["digest"] = "other" if other == "code" else made["code"]["digest"]
        beside.write_text(json.dumps(made))
    waits_for_another(monkeypatch)
    with around(planned()):
        assert not Path("out.json").exists()
        assert not beside.exists()


KILLED = """
import os, signal
from statecut.files import atomic_write
with atomic_write("out.json") as path:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_job_was_writing_is_removed_by_the_next_and_nothing_else(planned, around):
    others = {".out.json.backup", ".other.json.abcdefgh", "out.json.abcdefgh"}
    for name in others:
        Path(name).mkdir()
    before = {path.name for path in Path().iterdir()}
    killed = subprocess.run([sys.executable, "-c", KILLED])
    assert killed.returncode == -signal.SIGKILL
    (left,) = {path.name for path in Path().iterdir()} - before
    with around(planned()):
        assert not Path(left).exists()
    assert all(Path(name).is_dir() for name in others)


def test_records_of_the_published_run_can_be_read(tmp_path):
    archive = Path(__file__).parents[1] / "results/lab/h200/results.tar.xz"
    with tarfile.open(archive) as files:
        records = [name for name in files.getnames() if name.endswith(PROVENANCE)]
        files.extractall(tmp_path, records, filter="data")
    for name in records:
        record = Provenance.read(tmp_path / name.removesuffix(PROVENANCE))
        assert record is not None
        assert record.seconds > 0
        assert record.code.digest
