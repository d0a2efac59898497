"""Tuned kernels are compiled side by side, for a GPU that need not be there."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from keycut.benchmarking.examination import candidates
from keycut.benchmarking.tuning import tuners
from keycut.patches import fla as fla_patches
from keycut.patches import triton as triton_patches

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


def tune(times: dict[int, float]) -> tuple[Autotuner, list[Any]]:
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


def test_all_candidates_are_compiled_before_the_first_is_timed(hopper, monkeypatch) -> None:
    times = {16: 3.0, 32: 1.0, 128: 2.0}
    plain, seen = tune(times)
    assert len(seen[0]) == 0
    assert plain.best_config.kwargs == {"BLOCK": 32}

    threads = set()
    compile_one = triton.compiler.compile

    def compile_and_tell(*args, **given):
        threads.add(threading.current_thread())
        return compile_one(*args, **given)

    triton_patches.compile_on_all_cores()
    triton_patches.compile_on_all_cores()
    monkeypatch.setattr(triton.compiler, "compile", compile_and_tell)
    ours, seen = tune(times)
    assert ours.best_config.kwargs == plain.best_config.kwargs
    assert list(ours.configs_timings.values()) == list(plain.configs_timings.values())
    done = [isinstance(kernel, CompiledKernel) for kernel in seen[0]]
    assert done == [True, True, False, True]
    assert threads
    assert threading.main_thread() not in threads
    # What did not compile says so to whoever wants to launch it.
    with pytest.raises(CompileTimeAssertionFailure):
        _ = seen[0][2].function


def test_a_choice_that_is_known_compiles_nothing(hopper, monkeypatch) -> None:
    triton_patches.compile_on_all_cores()
    tuner, seen = tune({16: 1.0, 32: 2.0, 128: 3.0})
    monkeypatch.setattr(triton_patches, "compile_all", None)
    x = torch.zeros(128)
    tuner.run(x, x, 128, grid=(1,), warmup=True)
    assert len(seen) == len(SIZES)


@pytest.fixture
def backward(monkeypatch) -> Any:
    """The tuner of the backward pass, as fla has it; on a Hopper it offers two warps and four."""
    import fla.ops.common.chunk_o  # noqa: F401

    (tuner,) = [
        tuner for tuner in tuners() if tuner.base_fn.__name__ == fla_patches.MISCOMPILED_KERNEL
    ]
    configs = [triton.Config({}, num_warps=w, num_stages=s) for w in (2, 4) for s in (2, 3, 4)]
    monkeypatch.setattr(tuner, "configs", configs)
    monkeypatch.setattr(tuner, "early_config_prune", tuner.early_config_prune)
    monkeypatch.setattr(tuner, "nargs", {}, raising=False)
    monkeypatch.setattr(tuner, "cache", {})
    return tuner


def warps(configs: list[Any]) -> set[int]:
    return {config.num_warps for config in configs}


@pytest.mark.parametrize(("block", "offered"), [(16, {2}), (32, {2}), (64, {2, 4}), (128, {2, 4})])
def test_tiles_that_the_assembler_gets_wrong_are_left_out(backward, hopper, block, offered) -> None:
    fla_patches.leave_out_miscompiled_tiles()
    assert warps(backward.prune_configs({"BK": block})) == offered
    key = tuple(block if name == "BK" else 1 for name in backward.keys)
    backward.cache[key] = backward.configs[0]
    assert warps(candidates(backward)) == offered  # what the preflight looks at


def test_a_newer_assembler_and_another_gpu_keep_all_tiles(backward, hopper, monkeypatch) -> None:
    fla_patches.leave_out_miscompiled_tiles()
    newer = SimpleNamespace(version="13.1")
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas", lambda arch: newer)
    assert warps(backward.prune_configs({"BK": 32})) == {2, 4}
    monkeypatch.setattr(newer, "version", "12.8")
    assert warps(backward.prune_configs({"BK": 32})) == {2}
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 80, 32)))
    assert warps(backward.prune_configs({"BK": 32})) == {2, 4}
