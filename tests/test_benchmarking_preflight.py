import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction.config import Preflight
from statecut.cli import main
from statecut.errors import InputError
from statecut.files import write_json
from statecut.models.shapes import Shape
from statecut.preflight import examination, preflight
from statecut.preflight.preflight import ShapeVerdict, check_shape, check_shapes, judge, read
from statecut.preflight.process import Outcome

SETTINGS = Preflight(length=80, tolerance=0.01)
RIGHT = {
    "forward": {"o": 0.004},
    "backward": {"o": 0.004, "dq": 0.005, "dk": 0.005},
    "tiles": {"kernel": 0.006},
    "layer_forward": {"o": 0.01},
    "layer_backward": {"dx": 0.02},
}


def deltanet(width: int) -> Shape:
    return Shape("delta_net", 8, width, 8, 128)


def verdict(found: dict, reason: str = "") -> ShapeVerdict:
    return judge(deltanet(32), 0.01, Outcome(list(found.items()), reason, 1.0))


def test_a_width_trains_if_all_parts_ended_and_are_right() -> None:
    assert verdict(RIGHT).verdict == "trains"
    assert verdict(RIGHT).errors == {"o": 0.004, "dq": 0.005, "dk": 0.005}


@pytest.mark.parametrize("part", ["backward", "tiles", "layer_forward", "layer_backward"])
@pytest.mark.parametrize("error", [0.3, math.nan])
def test_a_wrong_part_after_the_forward_pass_leaves_inference(part: str, error: float) -> None:
    found = verdict({**RIGHT, part: {"dk": error}})
    assert found.verdict == "infers only"
    assert "dk is off by" in found.reason


@pytest.mark.parametrize("parts", range(5))
def test_a_crash_leaves_what_ended_before_it(parts: int) -> None:
    found = verdict(dict(list(RIGHT.items())[:parts]), "CUDA error: an illegal memory access")
    assert found.verdict == ("infers only" if parts else "crashes")
    assert "illegal memory access" in found.reason


def test_a_wrong_forward_pass_is_good_for_nothing() -> None:
    assert verdict({**RIGHT, "forward": {"o": math.nan}}).verdict == "crashes"


WIDTHS = st.integers(1, 256)


@given(wanted=st.sets(WIDTHS, min_size=1, max_size=5), good=st.sets(WIDTHS | st.just(64)))
def test_a_width_is_padded_to_the_next_power_of_two_that_trains(wanted: set, good: set) -> None:
    looked_at = []

    def examined(shape, *_):
        looked_at.append(shape)
        return ShapeVerdict(shape, "trains" if shape.width in good else "infers only")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_examine", examined)
        found = list(check_shapes([deltanet(w) for w in sorted(wanted)], SETTINGS))
    assert sorted(one.shape for one in found) == [deltanet(w) for w in sorted(wanted)]
    assert len(looked_at) == len(set(looked_at))
    for one in found:
        width = one.shape.width
        powers = [2**i for i in range(4, 9) if 2**i > width and 2**i in good]
        expected = None if width in good else min(powers, default=None)
        assert one.padded_to == expected
        assert one.trainable == (width in good or expected is not None)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1), min_size=1))
def test_every_tile_of_every_kernel_is_tried_and_the_choice_restored(errors: list) -> None:
    tuners = [
        SimpleNamespace(configs=list(range(len(some))), cache={"key": 0}, errors=some,
                        base_fn=SimpleNamespace(__name__=f"kernel_{i}"))
        for i, some in enumerate(errors)
    ]  # fmt: skip
    unused = SimpleNamespace(configs=[0, 1], cache={})

    def worst() -> float:
        return max(tuner.errors[tuner.cache["key"]] for tuner in tuners)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "tuners", lambda: [*tuners, unused])
        found = dict(examination.over_all_tiles(worst))
    chosen = [some[0] for some in errors]
    assert found == {
        f"kernel_{i}": max(max(some), *chosen[:i], *chosen[i + 1 :], 0.0)
        for i, some in enumerate(errors)
    }
    assert all(tuner.cache == {"key": 0} for tuner in tuners)


def test_a_rule_is_checked_as_each_architecture_calls_it() -> None:
    """transformers' hybrids repeat keys, and keep the state with keys first."""
    options = examination.call_options
    assert options(Shape("gated_deltanet", 4, 64, 4, 128)) == [{"state_v_first": True}, {}]
    assert options(Shape("gated_deltanet", 2, 64, 4, 128)) == [{"state_v_first": True}]
    assert options(deltanet(64)) == [{}]


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_way_to_call_a_rule_decides(monkeypatch, wrong: int) -> None:
    original, ways = examination._kernel, []

    def kernel(rule, options, device):
        ways.append(options)
        scale = 2 if len(ways) == wrong + 1 else 1
        right = original(rule, options, device)
        return lambda **inputs: scale * right(**inputs)

    monkeypatch.setattr(examination, "_kernel", kernel)
    parts = dict(examination.examine(Shape("gated_deltanet", 2, 7, 2, 16), 40, "cpu"))
    assert len(ways) == 2
    assert parts["forward"]["o"] > 0.5
    assert parts["backward"]["dk"] > 0.5


@pytest.mark.parametrize(
    "shape",
    [
        Shape("delta_net", 2, 7, 2, 32),
        Shape("gated_deltanet", 2, 7, 2, 32),
        Shape("gated_deltanet", 1, 7, 3, 16),
        Shape("delta_net", 2, 16, 2, 8),  # fewer values than keys, as pruning may leave
        Shape("gated_deltanet", 1, 16, 3, 5),
    ],
    ids=lambda shape: shape.name,
)
def test_the_plain_rules_of_a_cpu_agree_with_the_recurrence(shape: Shape, tmp_path: Path) -> None:
    out = tmp_path / "8.json"
    found = check_shape(shape, SETTINGS, out, own_process=False)
    assert found.trains
    assert found.shape == shape
    assert found.machine["device"] == "cpu"
    assert set(found.errors) == {"o", "dq", "dk", "dv", "dbeta"} | (
        {"dg"} if shape.kernel == "gated_deltanet" else set()
    )
    assert max(found.errors.values()) < 1e-5
    assert {"o", "dx", "dq_proj.weight", "dq_conv1d.weight"} <= set(found.layer)
    assert max(found.layer.values()) < 1e-4
    assert read(out) == found


def test_a_rule_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    right = examination._kernel
    monkeypatch.setattr(
        examination, "_kernel", lambda *of: lambda **inputs: 1.02 * right(*of)(**inputs)
    )
    found = check_shape(deltanet(8), SETTINGS, tmp_path / "8.json", own_process=False)
    assert (found.verdict, found.padded_to) == ("crashes", None)
    assert found.reason.startswith("forward: o is off by 0.02")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("delta_net", 8, 0, 8, 128), "width 0 for delta_net: the kernels take 1 to 256"),
        (("gated_deltanet", 4, 257, 4, 256), "width 257 for gated_deltanet"),
        (("delta", 8, 64, 8, 128), "kernel 'delta' does not exist; did you mean 'delta_net'?"),
        (("delta_net", 0, 64, 0, 128), "heads and their widths must be 1 or more"),
        (("gated_deltanet", 4, 64, 6, 128), "6 value heads must be a multiple of 4 key heads"),
        (("delta_net", 4, 64, 8, 128), "delta_net has as many value heads as key heads"),
    ],
)
def test_shapes_that_do_not_exist_are_refused(shape, message, tmp_path) -> None:
    with pytest.raises(InputError, match=message.replace("?", "\\?")):
        check_shape(Shape(*shape), SETTINGS, tmp_path / "x.json")


def test_a_file_that_is_no_verdict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"seconds": 3}')
    with pytest.raises(InputError, match=r"x\.json: not a preflight"):
        read(tmp_path / "x.json")


def test_training_heeds_the_verdict(tmp_path: Path) -> None:
    shape, file = Shape("delta_net", 16, 32, 16, 128), tmp_path / "x.json"

    def padding(verdict: str, padded_to: int | None, gpu: str | None = None, **how) -> int | None:
        reason = "" if verdict == "trains" else "dk is 0.3 off"
        write_json(
            file, asdict(ShapeVerdict(shape, verdict, padded_to, reason, machine={"gpu": gpu}))
        )
        return preflight.padding(file, **how)

    assert padding("trains", None) is None
    assert padding("infers only", 64) == 64
    with pytest.raises(InputError, match=r"16x32-16x128 cannot be trained here: dk is 0\.3 off"):
        padding("infers only", None)
    with pytest.raises(InputError, match="cannot be trained here"):
        padding("infers only", 64, may_pad=False)
    with pytest.raises(InputError, match="NVIDIA A100 was checked, and this is a CPU"):
        padding("trains", None, "NVIDIA A100")


def test_the_command_exits_1_if_a_width_has_no_way(monkeypatch, tmp_path, capsys) -> None:
    def examined(shape, *_):
        trains = shape.kernel == "delta_net" and shape.width != 32
        word, reason = ("trains", "") if trains else ("infers only", "illegal")
        return ShapeVerdict(shape, word, errors={"o": 0.005}, reason=reason)

    monkeypatch.setattr(preflight, "_examine", examined)
    assert (
        main(["preflight", "--kernel", "delta_net", "--widths", "128,32", "--json", str(tmp_path)])
        == 0
    )
    assert "delta_net        16x32  16x128  infers only      64" in capsys.readouterr().out
    assert json.loads((tmp_path / "delta_net-16x32-16x128.json").read_text())["padded_to"] == 64
    narrow = ["--kernel", "delta_net", "--widths", "64", "--heads", "4", "--value-width", "16"]
    assert main(["preflight", *narrow, "--json", str(tmp_path)]) == 0
    assert (tmp_path / "delta_net-4x64-4x16.json").is_file()
    with pytest.raises(SystemExit) as end:
        main(["preflight", "--kernel", "gated_deltanet", "--widths", "64"])
    assert end.value.code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --configfile, or --kernel"),
        (["--kernel", "delta_net"], "--widths missing: give whole numbers"),
        (["--kernel", "delta_net", "--widths", "64,x"], "--widths 64,x"),
        (["--kernel", "delta_net", "--widths", "0"], "width 0 for delta_net"),
        (["--kernel", "delta_net", "--widths", "8", "--value-heads", "3"], "3 value heads must be"),
        (["--kernel", "delta_net", "--widths", "8", "--jobs", "0"], "--jobs must be 1 or more"),
        (["--kernel", "delta_net", "--widths", "8", "--limit", "nan"], "and --limit more than 0"),
        (["--kernel", "delta_net", "--widths", "8", "--json", __file__], "Not a directory"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "check_shapes", None)  # before any work
    assert main(["preflight", *arguments]) == 2
    assert message in capsys.readouterr().err
