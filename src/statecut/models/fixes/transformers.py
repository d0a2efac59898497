"""transformers 5.17.0 to 5.23.0."""

from __future__ import annotations

from typing import Any


def split_olmo_filters_by_width() -> None:
    """Saved OLMo Hybrids have the filters of queries, keys and values in tensors of their own.

    In memory they are one; when transformers saves it, it cuts it into thirds, whatever the widths.
    It reads such files back, and nothing else does. Safe to repeat.
    Upstream: none known. Goes when `Chunk` knows of sizes.
    """
    from transformers import core_model_loading

    chunk: Any = core_model_loading.Chunk
    original = chunk.convert
    if original.__module__ == __name__:
        return

    def convert(self: Any, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = original(self, input_dict, *args, **kwargs)
        config: Any = kwargs.get("config")
        if getattr(config, "model_type", None) != "olmo_hybrid":
            return chunks
        import torch

        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        parts = torch.cat([*chunks.values()]).split([keys, keys, values])
        return {name: part.contiguous() for name, part in zip(chunks, parts, strict=True)}

    chunk.convert = convert
