"""Square models in a third engine: llama.cpp on a CPU. By hand: make test-llama, which builds it.

llama.cpp's own converter writes the GGUF file, except for the tokenizer: it takes only those that
it has on a list. These tests give token ids, so the file has none.
"""

import importlib
import json
from functools import partial

import pytest
import torch
from small_models import EXPERTS, LINEAR, VISION, save_stock, some

from statecut.models.checkpoint import Checkpoint, load
from statecut.pruning.slicing import slice_model
from statecut.serving.engines import SQUARES

# Qwen3.5's own sections fill a head of 256 channels. Text has one position in all of them.
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0]}  # fmt: skip
TEXT_CONFIGS = {
    "qwen3_next": {**LINEAR, **EXPERTS},
    "qwen3_5": {**LINEAR, "rope_parameters": ROPE},
    "qwen3_5_moe": {**LINEAR, **EXPERTS, "rope_parameters": ROPE},
}
TEXT_CONFIGS |= {f"{kind}_text": TEXT_CONFIGS[kind] for kind in ("qwen3_5", "qwen3_5_moe")}
WIDTHS = (7, 20, 24, 48, 96, 192, *SQUARES)
IDS = torch.randint(1, 97, (70,), generator=torch.Generator().manual_seed(2)).tolist()


def tiny_model(kind, d_k, d_v, folder):
    config = {**TEXT_CONFIGS[kind], "linear_key_head_dim": d_k, "linear_value_head_dim": d_v}
    if kind in ("qwen3_5", "qwen3_5_moe"):
        config = {"text_config": config, "vision_config": VISION}
    return save_stock(folder, kind, config)


def convert(folder):
    """As convert_hf_to_gguf.py --outtype f32 --no-nextn has it, without a tokenizer."""
    import gguf
    from conversion import get_model_class

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]

    class Converter(get_model_class(name)):
        model_arch = get_model_class(name).model_arch
        no_mtp = True

        def set_vocab(self):
            self._set_vocab_none()
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    file = folder / "model.gguf"
    with torch.inference_mode():
        Converter(folder, gguf.LlamaFileType.ALL_F32, file).write()
    return file


def llama_logits(file, batches):
    """(tokens, vocabulary), everything in float32."""
    from llama_cpp import GGML_TYPE_F32, Llama

    cache = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    model = Llama(str(file), n_ctx=128, logits_all=True, n_threads=1, verbose=False, **cache)
    for batch in batches:
        model.eval(batch)
    return torch.from_numpy(model.scores[: model.n_tokens].copy())


def l2_norm(x, dim=-1, eps=1e-6, *, eps_of_config):
    return x / (x.square().sum(dim, keepdim=True) + eps_of_config).sqrt()


def assert_same_logits(folder, monkeypatch):
    """All tokens at once, and one after the other.

    llama.cpp takes rms_norm_eps for the L2 norm of queries and keys, too, where transformers has
    1e-6; so transformers gets that eps here.
    """
    file = convert(folder)
    model, eps = load(folder), Checkpoint(folder).text_config["rms_norm_eps"]
    place = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(place, "l2norm", partial(l2_norm, eps_of_config=eps))
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    for batches in ([IDS], [[token] for token in IDS]):
        torch.testing.assert_close(llama_logits(file, batches), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", TEXT_CONFIGS)
@pytest.mark.parametrize(
    ("width", "d_k", "d_v"),
    [
        *((width, width, width) for width in WIDTHS),
        (16, 32, 16),
        (20, 32, 20),
        (16, 32, 32),
        (20, 32, 32),
    ],
)
def test_squares_and_cuts_to_squares_have_the_logits_of_transformers(
    kind, width, d_k, d_v, tmp_path, monkeypatch
):
    folder = tiny_model(kind, d_k, d_v, tmp_path / "model")
    if d_k > width:
        whole, out = Checkpoint(folder), tmp_path / "pruned"
        values = some(whole.shape, width) if d_v > width else None
        slice_model(whole, some(whole.shape, width, "key"), out, values=values, dtype=None)
        folder = out
    assert_same_logits(folder, monkeypatch)


@pytest.mark.parametrize(("d_k", "d_v"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("kind", TEXT_CONFIGS)
def test_other_than_squares_are_refused_when_they_are_loaded(kind, d_k, d_v, tmp_path):
    file = convert(tiny_model(kind, d_k, d_v, tmp_path / "model"))
    with pytest.raises(ValueError, match="Failed to load model from file"):
        llama_logits(file, [IDS])
