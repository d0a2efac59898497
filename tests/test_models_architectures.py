"""Adapters: what they hold for those who ask, and one of an architecture that is none of ours."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from small_models import SMALL, change_channels
from torch import nn

from reproduction.reporting.style import KERNELS
from statecut.models import capture, create
from statecut.models.architectures import ARCHITECTURES, RULES, architecture
from statecut.models.architectures.base import Call, ChannelTensor
from statecut.models.shapes import Kernel, MixerShape
from statecut.pruning.slicing import Keep

SHAPE = MixerShape(layers=(1,), heads=3, width=5, value_heads=6, value_width=4)


def test_importing_them_is_cheap():
    heavy = "{'torch', 'transformers', 'fla', 'numpy'} & set(sys.modules)"
    command = f"import sys, statecut.models.architectures; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_every_delta_rule_can_be_configured_and_drawn():
    assert {*RULES} == {*get_args(Kernel)} == {*KERNELS}


@pytest.mark.parametrize("name", SMALL)
def test_what_an_adapter_names_is_there(name):
    model = create(SMALL[name], seed=0)
    kind, shape, mixers = capture.mixers(model)
    tensors = model.state_dict()
    for layer in shape.layers:
        assert all(kind.name(layer, key) in tensors for key in (kind.q_proj, kind.k_proj))
        filters = {kind.name(layer, key) for key in kind.filters}
        assert filters & set(tensors) or not filters
    norm, _, eps = kind.norm_eps.rpartition(".")
    for mixer in mixers:
        assert mixer.get_parameter(kind.o_proj).shape[1] == shape.value_heads * shape.value_width
        assert getattr(mixer.get_submodule(norm), eps) > 0
        for part in (*kind.projections, *kind.convolutions):
            mixer.get_submodule(part)
    if kind.rule:
        assert kind.rule.chunked == kind.call.functions[0].removeprefix("torch_")
    assert {*kind.call.functions} <= kind.cpu_fallbacks().keys()


def interleaved(side):
    """Qwen3-Next's in_proj_qkvz: for each key head q, k, and the v and z of its value heads."""

    def layout(shape, channels):
        values = shape.value_heads // shape.heads * shape.value_width
        sizes = [shape.width, shape.width, values, values]
        starts = np.arange(shape.heads) * sum(sizes) + sum(sizes[:side])
        return starts[:, None] + np.arange(sizes[side])

    return layout


def flat(side):
    """Its conv1d: q of all heads, k of all heads, v."""
    return lambda shape, channels: (
        np.arange(np.prod(shape.size(channels))) + side * shape.heads * shape.width
    )


def parts(name, role, layout, sides):
    return tuple(
        ChannelTensor(name, role, "key" if side < 2 else "value", layout=layout(side))
        for side in range(sides)
    )


Q, K, V, Z = parts("in_proj_qkvz.weight", "projection", interleaved, 4)
FILTERS = parts("conv1d.weight", "filter", flat, 3)
QWEN3_NEXT = replace(
    ARCHITECTURES["gated_deltanet"],
    model_type="qwen3_next",
    resized=lambda config, width: {**config, "linear_key_head_dim": width},
    mixer="model.layers.{layer}.linear_attn.",
    q_proj=Q,
    k_proj=K,
    filters=FILTERS[:2],
    v_proj=V,
    value_tensors=(Z, FILTERS[2]),
)


def test_queries_and_keys_between_other_rows_of_one_tensor_are_sliced():
    shape, generator = SHAPE, torch.Generator().manual_seed(1)
    group = shape.value_heads // shape.heads
    kept = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(3)])[None]
    weight = torch.randn(3 * (2 * 5 + 2 * group * 4), 7, generator=generator)
    conv = torch.randn(2 * 3 * 5 + 6 * 4, 1, 4, generator=generator)
    prefix = "model.layers.1.linear_attn."
    other = torch.randn(2, 2)
    found = change_channels(
        {f"{prefix}in_proj_qkvz.weight": weight, f"{prefix}conv1d.weight": conv,
         "model.layers.0.self_attn.q_proj.weight": other}.items(),
        QWEN3_NEXT, shape, Keep(kept),
    )  # fmt: skip

    rows, filters, row = [], {"q": [], "k": []}, 0
    for head in range(3):
        for _ in range(2):  # q, then k
            rows += [weight[row + channel] for channel in kept[0, head]]
            row += 5
        for _ in range(2 * group * 4):  # v and z
            rows.append(weight[row])
            row += 1
        filters["q"] += [conv[head * 5 + channel] for channel in kept[0, head]]
        filters["k"] += [conv[15 + head * 5 + channel] for channel in kept[0, head]]
    assert torch.equal(found[f"{prefix}in_proj_qkvz.weight"], torch.stack(rows))
    expected = torch.stack([*filters["q"], *filters["k"], *conv[30:]])
    assert torch.equal(found[f"{prefix}conv1d.weight"], expected)
    assert found["model.layers.0.self_attn.q_proj.weight"] is other


def test_a_rule_that_is_called_by_position_with_repeated_keys_is_shown_the_models_own(monkeypatch):
    rules = SimpleNamespace(chunk=lambda q, k, v, *, beta: q.sum() + beta)
    monkeypatch.setitem(sys.modules, "some_hybrid", rules)
    kind = replace(
        architecture(SMALL["gated"]),
        call=Call("some_hybrid", ("chunk",), by_position=("q", "k", "v"), repeated=True),
    )

    class Mixer(nn.Module):
        def forward(self, hidden_states):
            k = hidden_states.repeat_interleave(2, 2)
            return rules.chunk(k, k + 1, k, beta=3)

    mixer, seen = Mixer(), []
    monkeypatch.setattr(capture, "mixers", lambda model: (kind, SHAPE, [mixer]))
    x = torch.randn(1, 4, 3, 5)
    expected = mixer(x)
    with capture.capture_rule_inputs(mixer, lambda index, rule: seen.append((index, rule))):
        assert torch.equal(mixer(x), expected)
    ((place, given),) = seen
    assert place == 0
    assert torch.equal(given["q"], x)
    assert torch.equal(given["k"], x + 1)
    assert given["v"].shape[2] == 6
    assert given["beta"] == 3
