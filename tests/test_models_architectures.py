"""Adapters: what they name is there, and importing them is cheap."""

import subprocess
import sys
from typing import get_args

import pytest
from small_models import SMALL

from reproduction.reporting.style import KERNELS
from statecut.models import capture, create
from statecut.models.architectures import RULES
from statecut.models.shapes import Kernel


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
