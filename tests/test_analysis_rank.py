"""The fast states and their ranks, against a recurrence token by token and SVD by SVD."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_model import plain_logits, states
from small_models import SMALL

from reproduction.analysis.rank import RankAnalysis
from reproduction.analysis.spectra import effective_ranks, largest_eigenvalues
from reproduction.analysis.states import analyse_rank, states_in_blocks, writes
from statecut.errors import InputError
from statecut.models.checkpoint import create

NAMES = ["delta_net", "shared_head", "gated", "gated_value_heads"]
T, SKIP = 90, 7
HEADS = ((1, 1), (0, 0))
IDS = torch.randint(0, 97, (T,), generator=torch.Generator().manual_seed(4))
THREE_TOKENS = 3 * 4 * 2 * 2 * 16 * 16  # a small delta_net has 2 x 2 heads of 16 x 16 float32


def plain_states(model):
    """S_t as the paper writes it, d_v x d_k: one (T, value heads, d_v, d_k) for each layer."""
    p, found = dict(model.named_parameters()), []

    def seen(layer, x, q, k):
        at = f"model.layers.{layer}."
        w = {name.removeprefix(at): tensor for name, tensor in p.items() if name.startswith(at)}
        found.append(states(model.config, w, x)[0])

    with torch.no_grad():
        plain_logits(model, IDS, seen)
    return found


@pytest.fixture(scope="module", params=NAMES)
def both(request):
    model = create(SMALL[request.param], seed=2)
    analysis = analyse_rank(model, IDS, model_digest="d", heads=HEADS, skip=SKIP)
    return analysis, plain_states(model.double())


def test_ranks_and_spectra_are_those_of_the_plain_recurrence(both):
    analysis, states = both
    sigma = [torch.linalg.svdvals(layer).transpose(0, 1) for layer in states]  # (heads, T, d)
    for layer in range(2):
        expected = (sigma[layer] ** 2).sum(-1) / sigma[layer][..., 0] ** 2
        np.testing.assert_allclose(analysis.effective_rank[layer], expected, rtol=2e-4)
    d = min(states[0].shape[-2:])
    np.testing.assert_allclose(analysis.utilization, analysis.effective_rank / d)
    assert analysis.spectra.shape == (2, T - SKIP, d)
    for layer, head in HEADS:
        expected = sigma[layer][head, SKIP:].numpy()
        allowed = {"rtol": 2e-4, "atol": 2e-4 * expected.max()}
        np.testing.assert_allclose(analysis.spectrum(layer, head), expected, **allowed)


@pytest.mark.parametrize("block_bytes", [1, THREE_TOKENS, 2**28])
def test_the_size_of_a_block_changes_nothing_but_memory(block_bytes):
    model = create(SMALL["delta_net"], seed=2)
    lengths = [len(block) for block in states_in_blocks(writes(model, IDS), block_bytes)]
    assert max(lengths) == {1: 1, THREE_TOKENS: 3, 2**28: T}[block_bytes]
    found = analyse_rank(model, IDS, model_digest="d", heads=HEADS, skip=4, block_bytes=block_bytes)
    again = analyse_rank(model, IDS, model_digest="d", heads=HEADS, skip=4)
    np.testing.assert_allclose(found.effective_rank, again.effective_rank, rtol=1e-5)
    np.testing.assert_array_equal(found.spectra, again.spectra)


def test_a_bf16_model_has_float32_states():
    model = create(SMALL["gated"], seed=2)
    exact = analyse_rank(model, IDS, model_digest="d")
    w = writes(model.bfloat16(), IDS)
    assert {x.dtype for x in (w.k, w.v, w.beta, w.g)} == {torch.float32}
    torch.testing.assert_close(w.k.norm(dim=-1), torch.ones(w.k.shape[:-1]), rtol=1e-4, atol=0)
    rough = analyse_rank(model, IDS, model_digest="d")
    assert rough.provenance["dtype"] == "bfloat16"
    assert np.abs(rough.effective_rank / exact.effective_rank - 1).mean() < 0.05


@pytest.mark.parametrize("name", ["delta_net", "gated"])
def test_negative_eigenvalues_double_beta(name):
    config = {**SMALL[name], "num_hidden_layers": 1}  # a second layer would see other inputs
    once = writes(create(config, seed=2), IDS)
    twice = writes(create({**config, "allow_neg_eigval": True}, seed=2), IDS)
    torch.testing.assert_close(twice.beta, 2 * once.beta)


def test_of_a_hybrid_the_layers_with_a_delta_rule_are_analysed():
    model = create(SMALL["qwen3_5_tied"], seed=2)
    analysis = analyse_rank(model, IDS, model_digest="d", heads=[(2, 3)], skip=SKIP)
    assert analysis.layers == (0, 2)
    assert analysis.effective_rank.shape == (2, 4, T)  # four heads of values
    assert analysis.spectrum(2, 3).shape == (T - SKIP, 12)


# Effective ranks without an SVD


def by_squaring(states):
    """As a GPU does it."""
    S = states / torch.linalg.vector_norm(states, dim=(-2, -1), keepdim=True)
    return 1 / largest_eigenvalues(S @ S.mT)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.integers(1, 40),
    st.floats(0, 6),
    st.floats(-12, 12),
    st.integers(1, 20),
)
def test_both_ways_give_the_effective_rank(seed, m, n, decay, scale, N):
    generator = torch.Generator().manual_seed(seed)
    d = min(m, n)
    left, right = (torch.randn(N, x, d, generator=generator) for x in (m, n))
    sigma = torch.logspace(0, -decay, d)
    states = 10**scale * (torch.linalg.qr(left).Q * sigma) @ torch.linalg.qr(right).Q.mT
    squares = torch.linalg.svdvals(states.double()).square()
    expected = (squares.sum(-1) / squares.amax(-1)).float()
    torch.testing.assert_close(effective_ranks(states), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(by_squaring(states), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-5, 1e-3])
def test_squaring_ends_where_the_largest_singular_values_nearly_tie(gap):
    sigma = torch.tensor([1.0, 1.0 - gap, 0.3, 0.0])
    states = torch.linalg.qr(torch.randn(5, 128, 4)).Q * sigma
    expected = sigma.square().sum() / sigma.max() ** 2
    torch.testing.assert_close(by_squaring(states), expected.expand(5), rtol=1e-5, atol=0)


def test_a_state_of_zeros_has_rank_zero_and_leaves_the_others_alone():
    states = torch.stack([torch.zeros(4, 5), torch.eye(4, 5), torch.ones(4, 5)])
    torch.testing.assert_close(effective_ranks(states), torch.tensor([0.0, 4.0, 1.0]))
    grams = states @ states.mT
    torch.testing.assert_close(largest_eigenvalues(grams)[1:], torch.tensor([1.0, 20.0]))


# The artefact


def test_it_survives_the_disk_with_the_same_bytes(both, tmp_path):
    analysis, _ = both
    analysis.save(tmp_path / "a.npz")
    again = RankAnalysis.load(tmp_path / "a.npz")
    again.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert (again.heads, again.layers, again.skip) == (HEADS, (0, 1), SKIP)
    assert again.provenance == analysis.provenance
    np.testing.assert_array_equal(again.effective_rank, analysis.effective_rank)
    np.testing.assert_array_equal(again.spectrum(0, 0), analysis.spectrum(0, 0))


def test_a_state_that_is_no_number_names_layer_and_head():
    model = create(SMALL["delta_net"], seed=2)
    with torch.no_grad():
        model.model.layers[1].attn.v_proj.weight[20, 0] = torch.inf  # head 1 of two, 16 wide
    with pytest.raises(InputError, match=r"layer 1, head 1: the effective rank"):
        analyse_rank(model, IDS, model_digest="d")
