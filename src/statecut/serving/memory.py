"""How many requests fit into a GPU's memory, as serving engines count.

Read in vLLM 0.26 (platforms/interface.py, v1/core/kv_cache_utils.py), and equal to what it logs
(benchmarks/serving_speed.py); read in SGLang 0.5.17 (mem_cache/kv_cache_configurator.py), not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from statecut.models.shapes import Cache

SHARE = 0.9
"""Of the GPU's memory for weights and caches; engines leave a tenth to activations and graphs."""


@dataclass(frozen=True)
class Load:
    """What is served, and on what."""

    memory: float = 80e9  # bytes of the GPU
    tokens: int = 4096  # of each request
    drafts: int = 0  # tokens of speculative decoding, each with a state of its own
    prefix_cache: bool = False

    def left_for_caches(self, parameters: int) -> float:
        """Bytes, beside weights in 16 bits."""
        return self.memory * SHARE - 2 * parameters


@dataclass(frozen=True)
class Room:
    requests: int
    states: int  # kept per request
    state_bytes: int  # of one of them, all layers
    block: int | None = None  # tokens per block of softmax attention, where a state decides that


def vllm(cache: Cache, memory: float, load: Load) -> Room:
    """A state of one layer takes a page, and the blocks of softmax layers are made as large."""
    shape, (softmax,) = cache.shape, cache.softmax
    page = (shape.state_bytes() + cache.filter_bytes(load.drafts)) // len(shape.layers)
    per_token = softmax.cache_bytes(1) // softmax.layers
    block = 16 * -(-page // (16 * per_token))
    few, many = sorted((len(shape.layers), softmax.layers))
    group = many if many < 1.5 * few else few  # layers that share a block's number
    blocks = memory // (block * per_token) // group
    states = 1 + load.prefix_cache + load.drafts
    of_states = states * -(-len(shape.layers) // group)
    of_tokens = -(-load.tokens // block) * -(-softmax.layers // group)
    return Room(int(blocks / (of_states + of_tokens)), states, page * len(shape.layers), block)


def sglang(cache: Cache, memory: float, load: Load) -> Room:
    """States have a pool of slots, which takes 0.9 parts where tokens take one; a request holds 5
    slots with the prefix cache, and one for each draft."""
    slot = cache.state_bytes()
    states, drafts = 5 if load.prefix_cache else 1, load.drafts
    pool = memory * 0.9 / 1.9
    slots = (pool - slot * (1 + drafts)) // (slot * (1 + drafts / states))
    running = slots // states
    left = memory - (slots + 1) * slot - (running + 1) * drafts * slot
    requests = min(running, left // cache.softmax_bytes(1) // load.tokens)
    return Room(max(int(requests), 0), states + drafts, slot)


COUNTED: dict[str, Callable[[Cache, float, Load], Room]]
COUNTED = {"vllm": vllm, "vllm+statecut": vllm, "sglang": sglang}
