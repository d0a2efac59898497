"""A plugin for vLLM: with Statecut installed beside it, models of any d_k and d_v start in it.

vLLM prepares queries, keys and values of a prompt in a Triton kernel that compiles only where d_k
and d_v round up to the same power of two (docs/reference/vllm.md), and on a Hopper GPU it prefers a
prefill kernel that takes 128 alone. Where its own preparation does not compile, this one takes its
place; where no prefill kernel is given and a width is not 128, Triton's is chosen. And the output
norm of Kimi Delta Attention gets the eps of the config, which a cut changes, where vLLM has 1e-5.
All else is left to vLLM, and a version that compiles every width never gets here.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

KNOWN = (*(f"0.{minor}" for minor in range(25, 34)),)  # whose sources were read; 0.26 was run
logger = logging.getLogger("vllm.statecut")  # of whose name vLLM shows what is logged


def register() -> None:
    """vLLM calls it in each of its processes. It imports nothing of vLLM's: its kernels look at the
    GPU when they are imported, which must not happen in the front end."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name in REPLACED.keys() & sys.modules.keys():
        replace(sys.modules[name])


class Finder(MetaPathFinder):
    """Replaces a function as soon as its module is imported, before others take it from there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in REPLACED else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                replace(module)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def replace(module: ModuleType) -> None:
    """In the module and in those that took the function from it."""
    name, replacement = REPLACED[module.__name__]
    if (stock := getattr(module, name, None)) is None:
        logger.warning("statecut: %s has no %s, nothing is replaced", module.__name__, name)
    elif not hasattr(stock, "__wrapped__"):
        for holder in [m for m in sys.modules.values() if vars(m).get(name) is stock]:
            setattr(holder, name, replacement(stock))


def prepared(stock: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's preparation, or ours at widths for which that does not compile."""
    ours: set[tuple[int, int]] = set()
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def chosen(*args: Any, **options: Any) -> Any:
        from triton.compiler.errors import CompilationError

        from statecut.serving.vllm_kernels import prepare_on_gpu

        given = signature.bind(*args, **options).arguments
        widths = given["head_k_dim"], given["head_v_dim"]
        if widths not in ours:
            try:
                return stock(*args, **options)
            except CompilationError:
                announce("prepares queries, keys and values for d_k %d and d_v %d", *widths)
                ours.add(widths)
        return prepare_on_gpu(**given)

    return chosen


def backend(stock: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    """vLLM's choice of a prefill kernel, or Triton's where that takes 128 alone."""

    @functools.wraps(stock)
    def chosen(vllm_config: Any) -> tuple[str, str]:
        asked, active = stock(vllm_config)
        config = vllm_config.model_config.hf_text_config
        if asked != "auto" or active == "triton" or not hasattr(config, "linear_key_head_dim"):
            return asked, active  # the last for Kimi Linear, which has kernels of its own
        widths = (config.linear_key_head_dim, config.linear_value_head_dim)
        if widths == (128, 128):
            return asked, active
        announce("chooses Triton's prefill kernel for d_k %d and d_v %d", *widths)
        return asked, "triton"

    return chosen


def with_eps(stock: Any) -> Any:
    """Kimi Delta Attention with the config's eps in its output norm."""
    stock.__wrapped__ = make = stock.__init__

    @functools.wraps(make)
    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        make(self, config, *args, **options)
        if self.o_norm.eps != config.rms_norm_eps:
            announce("gives the output norm of KDA the config's eps")
            self.o_norm.eps = config.rms_norm_eps

    stock.__init__ = __init__
    return stock


@functools.cache
def announce(what: str, *widths: int) -> None:
    """Once, that the plugin does something."""
    import vllm

    logger.info(f"statecut {what}", *widths)
    if ".".join(vllm.__version__.split(".")[:2]) not in KNOWN:
        logger.warning("statecut was written for vLLM %s to %s", KNOWN[0], KNOWN[-1])


REPLACED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv": (
        "fused_post_conv_prep",
        prepared,
    ),
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": (
        "_resolve_gdn_prefill_backend",
        backend,
    ),
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": (
        "KimiGatedDeltaNetAttention",
        with_eps,
    ),
}
