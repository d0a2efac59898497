"""Fixes to Triton, without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends.nvidia import compiler
from triton.runtime.autotuner import Autotuner

from statecut.models.fixes import triton as triton_patches


@pytest.mark.parametrize(("driver", "loads"), [(13_000, True), (12_080, False)])
def test_a_hopper_has_the_newer_assembler_where_its_driver_loads_it(
    monkeypatch, caplog, driver, loads
):
    monkeypatch.setattr(compiler, "get_ptxas", compiler.get_ptxas)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(triton_patches, "driver_cuda", lambda: driver)
    triton_patches.driver_loads_cuda_13.cache_clear()
    old = compiler.get_ptxas(80)
    assert compiler.get_ptxas(90) == old  # or the patch can go

    triton_patches.assemble_with_ptxas_13()
    for _ in range(2):
        newer = compiler.get_ptxas(100)
        assert compiler.get_ptxas(90) == (newer if loads else old)
    assert tuple(map(int, newer.version.split("."))) >= (13, 1)
    assert compiler.get_ptxas(80) == old
    assert len(caplog.records) == (0 if loads else 1)

    monkeypatch.setenv("TRITON_PTXAS_PATH", old.path)
    assert compiler.get_ptxas(90) == old
    triton_patches.driver_loads_cuda_13.cache_clear()


@pytest.mark.parametrize("kept_on_disk", [False, True])
def test_what_is_tuned_serves_other_numbers_of_sequences_and_heads(monkeypatch, kept_on_disk):
    asked = []

    def original(tuner: Any, key: Any, candidates: list[str], choose: Any) -> bool:
        asked.append(key)
        if kept_on_disk:
            tuner.cache[key] = "kept"
        else:
            choose()
        return kept_on_disk

    monkeypatch.setattr(Autotuner, "check_disk_cache", original)
    triton_patches.tune_once_for_all_counts()
    triton_patches.tune_once_for_all_counts()  # once more changes nothing
    configs = [SimpleNamespace(kwargs={"BT": 64})]
    tuner = SimpleNamespace(keys=["B", "H", "K", "BT"], configs=configs, cache={})

    def tuned(key: tuple[Any, ...]) -> str:
        def choose() -> None:
            tuner.cache[key] = f"for K {key[2]}"

        Autotuner.check_disk_cache(tuner, key, [], choose)
        return tuner.cache[key]

    found = [tuned((*counts, K, "torch.bfloat16")) for K in (64, 32) for counts in ((1, 4), (9, 8))]
    assert asked == [("K=64", "torch.bfloat16"), ("K=32", "torch.bfloat16")]
    assert found == ["kept"] * 4 if kept_on_disk else ["for K 64"] * 2 + ["for K 32"] * 2
