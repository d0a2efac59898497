"""Choices of tiles: made once for all numbers of heads, kept, and made again where they must be."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statecut.files import read_json
from statecut.models import kernels, tiles
from statecut.preflight import tuners

NAMES = ["B", "H", "K", "BT", "NB"]
TYPES = ("torch.bfloat16", "torch.float32")
CANDIDATES = [
    triton.Config({"BK": block}, num_warps=warps) for block in (32, 64) for warps in (2, 4)
]


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A GPU that nothing is known of yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "gpu", lambda: "A_GPU")
    monkeypatch.setattr(tiles, "SHIPPED", tmp_path / "tuned")
    tiles.shipped.cache_clear()
    yield tmp_path
    tiles.shipped.cache_clear()


def kernel(name: str = "kernel") -> Any:
    """As a process has it that has just started."""
    return SimpleNamespace(base_fn=SimpleNamespace(__module__="fla.ops", __name__=name),
                           keys=NAMES, configs=CANDIDATES, cache={})  # fmt: skip


def choose(tuner: Any, key: tuple[Any, ...], best: Any, candidates: list[Any] = CANDIDATES) -> bool:
    """Whether the choice had to be made."""
    made = []

    def time_all() -> None:
        made.append(best)
        tuner.cache[key] = best

    known = tiles.kept_choice(tuner, key, candidates, time_all)
    assert known == (not made)
    return not known


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
@given(first=st.tuples(*[st.integers(1, 99)] * 5), other=st.tuples(*[st.integers(1, 99)] * 5))
def test_a_choice_serves_all_counts_of_its_widths_and_no_other_widths(first, other) -> None:
    best = CANDIDATES[2]
    choose(kernel(), (*first, *TYPES), best)
    alike = dict(zip(NAMES, other, strict=True)) | {"K": first[2], "BT": first[3]}
    later = kernel()
    key = (*alike.values(), *TYPES)
    assert not choose(later, key, CANDIDATES[0])
    assert later.cache == {key: best}
    assert tiles.widths_of(NAMES, key) == f"K={first[2]} BT={first[3]} bfloat16 float32"
    for changed in ({"K": first[2] + 100}, {"BT": first[3] + 100}):
        assert tiles.widths_of(NAMES, (*(alike | changed).values(), *TYPES)) != tiles.widths_of(
            NAMES, key
        )


def test_choices_are_of_one_kernel_and_of_types() -> None:
    key = (1, 2, 64, 64, 1, *TYPES)
    assert choose(kernel(), key, CANDIDATES[0])
    assert choose(kernel("another"), key, CANDIDATES[1])
    assert choose(kernel(), (*key[:-1], "torch.float16"), CANDIDATES[1])
    assert not choose(kernel(), key, CANDIDATES[1])


def test_a_tile_that_is_left_out_since_is_chosen_again() -> None:
    key = (1, 2, 64, 64, 1, *TYPES)
    choose(kernel(), key, CANDIDATES[1])
    later = kernel()
    assert choose(later, key, CANDIDATES[0], CANDIDATES[:1])
    assert later.cache == {key: CANDIDATES[0]}
    assert not choose(kernel(), key, CANDIDATES[1], CANDIDATES[:1])


def test_processes_that_start_together_choose_once() -> None:
    key = (1, 2, 64, 64, 1, *TYPES)
    made = []

    def process(number: int) -> Any:
        tuner = kernel()

        def time_all() -> None:
            made.append(number)
            time.sleep(0.05)
            tuner.cache[key] = CANDIDATES[number % 4]

        tiles.kept_choice(tuner, key, CANDIDATES, time_all)
        return tuner.cache[key]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(process, range(8)))
    assert len(made) == 1
    assert set(map(id, found)) == {id(CANDIDATES[made[0] % 4])}


def test_what_ships_for_this_gpu_and_these_versions_is_taken(machine) -> None:
    key = (1, 2, 64, 64, 1, *TYPES)
    choices = {"fla.ops.kernel": {tiles.widths_of(NAMES, key): tiles.tile(CANDIDATES[3])}}
    record = {"versions": tiles.versions(), "tiles": choices}
    tiles.write_json(machine / "tuned" / "A_GPU.json", record)
    tuner = kernel()
    assert not choose(tuner, key, CANDIDATES[0])
    assert tuner.cache == {key: CANDIDATES[3]}
    old = record | {"versions": tiles.versions() | {"triton": "3.0.0"}}
    tiles.write_json(machine / "tuned" / "A_GPU.json", old)
    tiles.shipped.cache_clear()
    assert choose(kernel(), key, CANDIDATES[0])


def test_a_key_with_values_left_out_is_of_itself_alone() -> None:
    known = kernel()
    choose(known, (1, 2, 64, 64, *TYPES), CANDIDATES[0])
    assert choose(kernel(), (1, 4, 64, 64, *TYPES), CANDIDATES[0])
    assert not choose(kernel(), (1, 2, 64, 64, *TYPES), CANDIDATES[0])


def test_keys_of_flas_kernels_are_named_by_what_is_given() -> None:
    """One of them counts a width among its keys that its candidates choose."""
    kernels.prepare()
    names = {tuner.base_fn.__name__: (tuner.keys, tiles.key_names(tuner)) for tuner in tuners()}
    keys, given = names["chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64"]
    assert set(keys) - set(given) == {"BV"}
    keys, given = names["chunk_bwd_kernel_dqkwg"]
    assert keys == given


def test_shipped_choices_are_of_kernels_that_there_are(monkeypatch) -> None:
    monkeypatch.undo()
    kernels.prepare()
    known = {tiles.kernel_name(tuner): tuner for tuner in tuners()}
    files = sorted(tiles.SHIPPED.glob("*.json"))
    assert files
    for path in files:
        record = read_json(path)
        assert record["versions"] == tiles.versions()
        for name, choices in record["tiles"].items():
            names = [key for key in tiles.key_names(known[name]) if key not in tiles.COUNTS]
            for widths in choices:
                assert [one.split("=")[0] for one in widths.split() if "=" in one] == names
