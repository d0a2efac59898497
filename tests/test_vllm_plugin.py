"""The plugin for vLLM, in a package that has vLLM's modules and names. In vLLM itself it is run by
benchmarks/serving.py."""

import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from statecut.models.delta_rule import l2_normalised
from statecut.serving import vllm_kernels, vllm_plugin

MODULES = {
    "third_party/flash_linear_attention/ops/fused_gdn_prefill_post_conv.py": """
from triton.compiler.errors import CompilationError
def fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim,
                         apply_l2norm=True, output_g_exp=False):
    if head_k_dim != head_v_dim:
        raise CompilationError("", None, None)
    return "stock"
""",
    "third_party/flash_linear_attention/ops/__init__.py": """
from .fused_gdn_prefill_post_conv import fused_post_conv_prep
""",
    "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": """
from vllm.third_party.flash_linear_attention.ops import fused_post_conv_prep
def _resolve_gdn_prefill_backend(vllm_config):
    return vllm_config.asked, "flashinfer"
""",
    "model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py": """
from types import SimpleNamespace
class KimiGatedDeltaNetAttention:
    def __init__(self, config, prefix=""):
        self.o_norm, self.prefix = SimpleNamespace(eps=1e-5), prefix
""",
    "__init__.py": "__version__ = '0.26.0'",
}
LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    for name, code in MODULES.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    vllm_plugin.announce.cache_clear()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def arguments(heads=2, value_heads=4, d_k=6, d_v=10, tokens=5):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(tokens, 2 * heads * d_k + value_heads * d_v, generator=generator)
    a, b = torch.randn(2, tokens, value_heads, generator=generator)
    A_log, dt_bias = torch.randn(2, value_heads, generator=generator)
    return given, a, b, A_log, dt_bias, heads, d_k, d_v


@pytest.mark.parametrize("when", ["before vLLM's modules", "after them"])
def test_only_widths_that_do_not_compile_are_prepared_here(vllm, when, caplog, monkeypatch):
    monkeypatch.setattr(vllm_kernels, "prepare_on_gpu", vllm_kernels.prepare)
    caplog.set_level("INFO")
    if when == "after them":
        importlib.import_module(LAYER)
    vllm_plugin.register()
    vllm_plugin.register()  # as vLLM may
    prepare = importlib.import_module(LAYER).fused_post_conv_prep
    assert prepare(*arguments(d_k=10)) == "stock"
    for _ in range(2):
        assert len(prepare(*arguments())) == 5
    assert caplog.messages == ["statecut prepares queries, keys and values for d_k 6 and d_v 10"]


@pytest.mark.parametrize(("asked", "width", "chosen"), [
    ("auto", 64, "triton"), ("auto", 128, "flashinfer"), ("flashinfer", 64, "flashinfer"),
])  # fmt: skip
def test_tritons_prefill_kernel_is_chosen_where_none_is_given(vllm, asked, width, chosen):
    vllm_plugin.register()
    widths = SimpleNamespace(linear_key_head_dim=width, linear_value_head_dim=128)
    config = SimpleNamespace(asked=asked, model_config=SimpleNamespace(hf_text_config=widths))
    assert importlib.import_module(LAYER)._resolve_gdn_prefill_backend(config) == (asked, chosen)
    config.model_config.hf_text_config = SimpleNamespace()  # of Kimi Linear, which asks as well
    stock = (asked, "flashinfer")
    assert importlib.import_module(LAYER)._resolve_gdn_prefill_backend(config) == stock


@pytest.mark.parametrize(("eps", "said"), [(4e-5, 1), (1e-5, 0)])
def test_kimis_output_norm_has_the_eps_of_the_config(vllm, caplog, eps, said):
    caplog.set_level("INFO")
    vllm_plugin.register()
    module = importlib.import_module(LAYER.replace("qwen", "kimi"))
    for prefix in ("a", "b"):
        layer = module.KimiGatedDeltaNetAttention(SimpleNamespace(rms_norm_eps=eps), prefix=prefix)
        assert (layer.o_norm.eps, layer.prefix) == (eps, prefix)
    assert len(caplog.messages) == said


def test_an_error_that_is_not_the_compilers_stays_one(vllm):
    vllm_plugin.register()
    with pytest.raises(TypeError):
        importlib.import_module(LAYER).fused_post_conv_prep(*arguments()[:3])


def test_what_is_prepared_is_what_the_rule_takes():
    given, a, b, A_log, dt_bias, heads, d_k, d_v = arguments()
    q, k, v, g, beta = vllm_kernels.prepare(*arguments())
    keys = heads * d_k
    torch.testing.assert_close(q, l2_normalised(given[:, :keys].reshape(5, heads, d_k)))
    torch.testing.assert_close(k, l2_normalised(given[:, keys : 2 * keys].reshape(5, heads, d_k)))
    assert torch.equal(v, given[:, 2 * keys :].reshape(5, 4, d_v))
    torch.testing.assert_close(g, -A_log.exp() * (1 + (a + dt_bias).exp()).log())
    torch.testing.assert_close(beta, 1 / (1 + (-b).exp()))
    decay = vllm_kernels.prepare(*arguments(), apply_l2norm=False, output_g_exp=True)
    assert torch.equal(decay[3], g.exp())
    assert torch.equal(decay[0].reshape(5, keys), given[:, :keys])
    assert all(tensor.is_contiguous() for tensor in (q, k, v))


def test_the_kernel_computes_the_same():
    # Triton decides when it is imported whether it interprets kernels.
    compared = subprocess.run([sys.executable, "-c", """
import random, torch
from statecut.serving.vllm_kernels import prepare, prepare_on_gpu
draw, _ = random.Random(5), torch.manual_seed(5)
for case in range(8):
    heads, d_k, d_v, tokens = (draw.randint(1, n) for n in (3, 40, 70, 40))
    value_heads = heads * draw.randint(1, 3)
    mixed = torch.randn(tokens, 2 * heads * d_k + value_heads * d_v + 3)[:, :-3]
    a, b = (20 * torch.randn(tokens, 2 * value_heads)).chunk(2, dim=1)
    given = (mixed, a, b, *torch.randn(2, value_heads), heads, d_k, d_v, case % 2, case % 3 == 0)
    torch.testing.assert_close(prepare_on_gpu(*given), prepare(*given))
print("compared")
"""], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)  # fmt: skip
    assert compared.stdout == "compared\n", compared.stderr


def test_installed_statecut_is_found_by_vllm():
    (plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="statecut")
    assert plugin.load() is vllm_plugin.register
