"""Tuned kernels are compiled side by side, for a GPU that need not be there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import CompiledKernel
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from statecut.models.fixes import triton as triton_patches

SIZES = [16, 32, 64, 128]


@triton.jit
def doubled(x, y, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 64)  # one of the candidates does not compile
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Triton compiles for a device, and asks it nothing."""
    there = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Autotuner, "_bench", Autotuner._bench)
    before = driver._active
    driver.set_active(there)
    yield
    driver._active = before


def tune(times):
    """A tuner that has chosen, and what was compiled for each candidate when it was timed."""
    doubled.device_caches.clear()
    seen = []

    def bench(call: Any, quantiles: Any) -> list[float]:
        kept = doubled.device_caches[0][0]
        seen.append(list(kept.values()))
        size = SIZES[len(seen) - 1]
        if size == 64:  # a launch would raise this
            raise CompileTimeAssertionFailure("", None, "")
        return [times[size]] * 3

    configs = [triton.Config({"BLOCK": size}) for size in SIZES]
    tuner = triton.autotune(configs, key=["n"], do_bench=bench)(doubled)
    x = torch.zeros(128)
    tuner.run(x, x, 128, grid=(1,), warmup=True)
    return tuner, seen


def test_all_candidates_are_compiled_before_the_first_is_timed(hopper):
    times = {16: 3.0, 32: 1.0, 128: 2.0}
    plain, seen = tune(times)
    assert len(seen[0]) == 0
    assert plain.best_config.kwargs == {"BLOCK": 32}

    triton_patches.compile_on_all_cores()
    triton_patches.compile_on_all_cores()
    ours, seen = tune(times)
    assert ours.best_config.kwargs == plain.best_config.kwargs
    done = [isinstance(kernel, CompiledKernel) for kernel in seen[0]]
    assert done == [True, True, False, True]
    # What did not compile says so to whoever wants to launch it.
    with pytest.raises(CompileTimeAssertionFailure):
        _ = seen[0][2].function


@pytest.mark.parametrize(("driver", "loads"), [(13_000, True), (12_080, False)])
def test_a_hopper_has_the_newer_assembler_where_its_driver_loads_it(
    hopper, monkeypatch, caplog, driver, loads
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
    chosen = ["kept"] * 4 if kept_on_disk else ["for K 64"] * 2 + ["for K 32"] * 2
    assert found == chosen
    shorter = (4, 64, "torch.bfloat16")  # H or K was not given
    assert triton_patches.without_counts(tuner, shorter) == shorter
