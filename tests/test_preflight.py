import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from threading import Thread
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.pretraining import verdicts
from reproduction.reporting.style import KERNELS
from statecut import preflight
from statecut.cli import main
from statecut.errors import InputError
from statecut.files import write_json
from statecut.models.architectures import RULES
from statecut.models.shapes import Kernel, Shape
from statecut.preflight import ShapeVerdict, check_shapes, judge
from statecut.process import Outcome

RIGHT = {
    "forward": {"o": 0.004},
    "backward": {"o": 0.004, "dq": 0.005, "dk": 0.005},
    "tiles": {"kernel": 0.006},
    "layer_forward": {"o": 0.01},
    "layer_backward": {"dx": 0.02},
}


def test_every_delta_rule_can_be_configured_and_drawn():
    assert {*RULES} == {*get_args(Kernel)} == {*KERNELS}


def deltanet(width):
    return Shape("delta_net", 8, width, 8, 128)


def verdict(found, reason=""):
    return judge(deltanet(32), 0.01, Outcome(list(found.items()), reason, 1.0))


@pytest.mark.parametrize("part", RIGHT)
def test_a_width_trains_if_all_parts_ended_and_are_right(part):
    assert verdict(RIGHT).verdict == "trains"
    assert verdict(RIGHT).errors == {"o": 0.004, "dq": 0.005, "dk": 0.005}
    before = {name: RIGHT[name] for name in [*RIGHT][: [*RIGHT].index(part)]}
    expected = "infers only" if before else "crashes"
    for error in (0.3, math.nan):
        found = verdict({**RIGHT, part: {"dk": error}})
        assert found.verdict == expected
        assert "dk is off by" in found.reason
    crashed = verdict(before, "CUDA error: an illegal memory access")
    assert crashed.verdict == expected
    assert "illegal memory access" in crashed.reason


WIDTHS = st.integers(1, 256)


@given(wanted=st.sets(WIDTHS, min_size=1, max_size=5), good=st.sets(WIDTHS | st.just(64)))
def test_a_width_is_padded_to_the_next_power_of_two_that_trains(wanted, good):
    looked_at = []

    def examine(shape, *_):
        looked_at.append(shape)
        return iter((RIGHT if shape.width in good else {"forward": {"o": 1.0}}).items())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "examine", examine)
        found = list(check_shapes([deltanet(w) for w in sorted(wanted)]))
    assert sorted(one.shape for one in found) == [deltanet(w) for w in sorted(wanted)]
    assert len(looked_at) == len(set(looked_at))
    for one in found:
        width = one.shape.width
        powers = [2**i for i in range(4, 9) if 2**i > width and 2**i in good]
        expected = None if width in good else min(powers, default=None)
        assert one.padded_to == expected
        assert one.trainable == (width in good or expected is not None)


def test_every_tile_of_every_kernel_is_tried_and_the_choice_restored(monkeypatch):
    errors = {"good": [0.1, 0.2], "bad": [0.1, 0.9, 0.3]}
    tuners = [
        SimpleNamespace(configs=[*range(len(tiles))], cache={"key": 0}, base_fn=SimpleNamespace(
                        __name__=name))
        for name, tiles in errors.items()
    ]  # fmt: skip
    unused = SimpleNamespace(configs=[0, 1], cache={})

    def worst() -> float:
        return max(errors[tuner.base_fn.__name__][tuner.cache["key"]] for tuner in tuners)

    monkeypatch.setattr(preflight, "tuners", lambda: [*tuners, unused])
    assert dict(preflight.over_all_tiles(worst)) == {"good": 0.2, "bad": 0.9}
    assert all(tuner.cache == {"key": 0} for tuner in tuners)


HANGS = """
import time
def examine(shape, *_):
    open(f"{shape.width}.started", "x").close()
    time.sleep(5)
    yield "forward", {"o": 1.0}
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_it_without_further_shapes(jobs, monkeypatch, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the processes at work
    monkeypatch.setattr(preflight, "examine", importlib.import_module("hangs").examine)
    shapes = [deltanet(width) for width in (3, 5, 7)]

    def interrupt():
        while len([*tmp_path.glob("*.started")]) < jobs:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(check_shapes(shapes, device="cuda", jobs=jobs))
    assert len([*tmp_path.glob("*.started")]) == jobs


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_way_to_call_a_rule_decides(monkeypatch, wrong):
    original, ways = preflight._kernel, []

    def kernel(shape, options):
        ways.append(options)
        scale = 2 if len(ways) == wrong + 1 else 1
        right = original(shape, options)
        return lambda **inputs: scale * right(**inputs)

    monkeypatch.setattr(preflight, "_kernel", kernel)
    parts = dict(preflight.examine(Shape("gated_deltanet", 2, 7, 2, 16), 40, "cpu"))
    assert len(ways) == 2
    assert parts["forward"]["o"] > 0.5
    assert parts["backward"]["dk"] > 0.5


@pytest.mark.parametrize(
    "shape",
    [
        Shape("delta_net", 2, 7, 2, 32),
        Shape("gated_deltanet", 1, 16, 3, 5),
        Shape("kda", 2, 6, 4, 5),
    ],
)
def test_the_plain_rules_of_a_cpu_agree_with_the_recurrence(shape):
    (found,) = check_shapes([shape], length=80)
    assert found.trains
    assert {"o", "dq", "dk", "dv", "dbeta"} <= set(found.errors)
    assert max(found.errors.values()) < 1e-5
    assert {"o", "dx", "dq_proj.weight", "dq_conv1d.weight"} <= set(found.layer)
    assert max(found.layer.values()) < 1e-4
    assert verdicts.from_json(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("verdict", "padded_to", "gpu", "may_pad", "expected"),
    [
        ("trains", None, None, True, None),
        ("infers only", 64, None, True, 64),
        ("infers only", None, None, True, r"16x32-16x128 cannot be trained here: dk is 0\.3 off"),
        ("infers only", 64, None, False, "cannot be trained here"),
        ("trains", None, "NVIDIA A100", True, "NVIDIA A100 was checked, and this is a CPU"),
    ],
)
def test_training_heeds_the_verdict(tmp_path, verdict, padded_to, gpu, may_pad, expected):
    shape, reason = Shape("delta_net", 16, 32, 16, 128), "dk is 0.3 off"
    found = ShapeVerdict(shape, verdict, padded_to, reason, machine={"gpu": gpu})
    write_json(tmp_path / "x.json", asdict(found))
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            verdicts.padding(tmp_path / "x.json", may_pad=may_pad)
    else:
        assert verdicts.padding(tmp_path / "x.json", may_pad=may_pad) == expected


def test_the_command_exits_1_if_a_width_has_no_way(monkeypatch, tmp_path, capsys):
    def examine(shape, *_):
        trains = shape.kernel == "delta_net" and shape.width != 32
        return iter((RIGHT if trains else {"forward": {"o": 0.005}, "tiles": {"o": 1}}).items())

    monkeypatch.setattr(preflight, "examine", examine)
    arguments = ["preflight", "--kernel", "delta_net", "--json", str(tmp_path), "--widths"]
    assert main([*arguments, "128,32"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("delta_net-16x32-16x128          infers only      64")
    assert json.loads((tmp_path / "delta_net-16x32-16x128.json").read_text())["padded_to"] == 64
    with pytest.raises(SystemExit) as end:
        main(["preflight", "--kernel", "gated_deltanet", "--widths", "64"])
    assert end.value.code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "delta"], "kernel 'delta' does not exist; did you mean 'delta_net'?"),
        (["--widths", "64,257"], "width 257: the kernels take 1 to 256"),
        (["--value-heads", "32"], "32 value heads: delta_net has as many as its 16 key heads"),
        (["--limit", "nan"], "and --limit more than 0"),
        (["--json", __file__], "Not a directory"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "check_shapes", None)  # before any work
    assert main(["preflight", "--kernel", "delta_net", "--widths", "8", *arguments]) == 2
    assert message in capsys.readouterr().err
