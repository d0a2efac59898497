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
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from reproduction.running.code import ROOT, code
from reproduction.running.job import job
from statecut.errors import InputError


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
    for name in ("REPRODUCTION_PRELOAD", "REPRODUCTION_CODE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    # What the job sets for itself is put back.
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE",
                 "ONEDNN_JIT_PROFILE", "TOKENIZERS_PARALLELISM", "TRITON_CACHE_DIR"):  # fmt: skip
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def make(settings={"run": "demo", "device": "cpu"}, **inputs):  # noqa: B006
        return SimpleNamespace(
            rule="work",
            input=Named(**inputs),
            output=Named(result="out.json"),
            params=Named(code=code("scripts/slice.py"), settings=settings),
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


def test_torch_leaves_nothing_in_the_temporary_folder(planned, around):
    work = (
        "import os, torch\nfrom pathlib import Path\n"
        "left = Path(f'/tmp/perf-{os.getpid()}.map')\n"
        "left.unlink(missing_ok=True)\n"  # of another process with this number
        "torch.randn(1, 3, 16, 16).to_mkldnn().to_dense()\nprint(left.exists())"
    )
    with around(planned()):
        done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def log_lines():
    """Behind the first, which is there whatever happens."""
    first, *lines = Path("work.log").read_text().splitlines()
    assert first == f"process {os.getpid()} on {platform.node()}"
    return lines


def test_output_goes_to_the_log_even_from_other_processes(planned, around):
    with around(planned()) as run:
        print("said")
        print("warned", file=sys.stderr)
        os.system("echo from outside")
    assert run.run == "demo"
    assert {*log_lines()} == {"said", "warned", "from outside"}


def test_a_fault_is_in_the_log_with_its_traceback_and_bad_input_without(planned, around):
    with pytest.raises(ZeroDivisionError), around(planned()):
        raise ZeroDivisionError("division by zero")
    assert "Traceback" in Path("work.log").read_text()
    with pytest.raises(SystemExit, match=r"reproduction: ratio 2: must lie in"), around(planned()):
        raise InputError("ratio 2: must lie in (0, 1)")
    assert log_lines() == ["reproduction: ratio 2: must lie in (0, 1)"]
    assert not Path("out.json.provenance.json").exists()


def test_the_hub_is_switched_off(planned, around):
    with around(planned()):
        assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_beside_the_output_stands_where_it_came_from(planned, around):
    for _ in range(2):
        with around(planned(model="model.bin")):
            assert not Path("out.json.provenance.json").exists()
    record = json.loads(Path("out.json.provenance.json").read_text())
    assert (record["rule"], record["inputs"]) == ("work", ["model.bin"])
    assert record["wildcards"] == {"model": "a"}
    assert [*record["code"]] == ["scripts/slice.py"]
    assert record["versions"]["python"].startswith("3.")
    assert (record["peak_mib"] > 0, record["gpu_peak_mib"]) == (True, 0)


def test_beside_it_stands_what_was_asked_for_and_how_much_of_a_gpu_was_used(
    planned, around, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: device * 5 * 2**30)
    job = planned()
    job.resources = {"mem_mb": 16000, "runtime": 30, "disk_mb": 1}
    with around(job):
        pass
    record = json.loads(Path("out.json.provenance.json").read_text())
    assert (record["asked"], record["gpu_peak_mib"]) == ({"mem_mb": 16000, "runtime": 30}, 5120)


def rules_on_a_gpu():
    text = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    rules = re.split(r"^ *rule (\w+):", text, flags=re.M)
    return [name for name, body in zip(rules[1::2], rules[2::2], strict=True) if "gpu=" in body]


@pytest.mark.parametrize("rule", rules_on_a_gpu())
def test_a_job_that_asks_for_a_gpu_ends_at_once_where_torch_can_use_none(
    planned, capfd, monkeypatch, rule
):
    import torch

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old.\nmore of it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.collect_env.get_nvidia_driver_version", lambda _: "550.54.15")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    snakemake = planned({"device": "cuda"})
    snakemake.rule, snakemake.resources = rule, {"gpu": 1}
    with pytest.raises(SystemExit), capfd.disabled():
        runpy.run_path(str(ROOT / f"scripts/{rule}.py"), {"snakemake": snakemake})
    lines = log_lines()
    assert lines[:2] == [
        f"reproduction: rule {rule} asks for 1 GPU: The NVIDIA driver on your system is too old.",
        f"  on {platform.node()}: torch {torch.__version__}, built for CUDA 13.0; driver "
        "550.54.15; CUDA_VISIBLE_DEVICES '0'",
    ]
    assert "`device: cpu`" in lines[2]


def test_a_run_that_says_cpu_leaves_gpus_alone(planned, around, monkeypatch):
    """Triton asks torch, and torch what is visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    snakemake = planned()
    snakemake.resources = {"gpu": 1}
    with around(snakemake) as run:
        assert run.device == "cpu"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert json.loads(Path("out.json.provenance.json").read_text())["gpus"] == []


def test_a_full_disk_is_reported_where_it_can_be_read(planned, around):
    with pytest.raises(SystemExit) as ended, around(planned()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    assert "No space left on device: 'model.safetensors': make room" in ended.value.code


def test_code_that_changed_after_the_plan_is_refused(planned, around):
    snakemake = planned()
    snakemake.params.code["scripts/slice.py"] = "another"
    with pytest.raises(SystemExit), around(snakemake):
        raise AssertionError("the work must not begin")
    assert "scripts/slice.py was changed after this job" in Path("work.log").read_text()


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
