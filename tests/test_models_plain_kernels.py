"""Models without a GPU: the same classes, the same numbers as the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_model import plain_logits
from small_models import HYBRIDS, SMALL, logits, relative

from statecut.models.checkpoint import create
from statecut.models.delta_rule import chunked_delta_rule, recurrent_delta_rule

FLA = [name for name in SMALL if name not in HYBRIDS]


def tokens(*shape):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(3))


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 200),
    seed=st.integers(0, 2**31),
    gated=st.booleans(),
    given_state=st.booleans(),
)
def test_chunked_delta_rule_is_the_recurrence(length, seed, gated, given_state):
    torch.manual_seed(seed)
    q, k = torch.randn(2, 2, length, 3, 5, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(2, length, 3, 7, dtype=torch.float64)
    beta = torch.rand(2, length, 3, dtype=torch.float64)
    # Decays down to e^-20 a step: their products underflow, their inverses would overflow.
    g = -20 * torch.rand(2, length, 3, dtype=torch.float64) ** 4 * gated
    state = torch.randn(2, 3, 5, 7, dtype=torch.float64) * given_state
    inputs = [x.requires_grad_() for x in (q, k, v, beta, g, state)]
    results = []
    for rule in (recurrent_delta_rule, chunked_delta_rule):
        o, last = rule(q, k, v, beta, g, 0.3, state)
        grads = torch.autograd.grad((o.sin().sum() + last.cos().sum()), inputs)
        results.append([o, last, *grads])
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@given(st.integers(0, 2**31))
def test_rotating_keys_and_queries_together_changes_no_output(seed):
    """The paper's proposition on invariance."""
    torch.manual_seed(seed)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 10, 1, 6, dtype=torch.float64), dim=-1)
    v, beta = torch.randn(1, 10, 1, 4, dtype=torch.float64), torch.rand(1, 10, 1).double()
    turn, state = torch.linalg.qr(torch.randn(6, 6).double()).Q, torch.zeros(1, 1, 6, 4).double()
    o, S = recurrent_delta_rule(q, k, v, beta, -beta, 1.0, state)
    turned, S_turned = recurrent_delta_rule(q @ turn, k @ turn, v, beta, -beta, 1.0, state)
    torch.testing.assert_close(turned, o)
    torch.testing.assert_close(S_turned, turn.mT @ S)


@pytest.mark.parametrize("name", FLA)
def test_logits_and_gradients_are_those_of_the_plain_recurrence(name):
    model = create(SMALL[name], seed=7).train()
    for length in (1, 70):
        ids = tokens(2, length)
        model.zero_grad()
        out = model(ids, labels=ids)
        expected = torch.stack([plain_logits(model, row) for row in ids])
        assert relative(out.logits, expected) < 1e-4
        if length == 1:  # nothing to predict
            continue
        loss = torch.nn.functional.cross_entropy(
            expected[:, :-1].reshape(-1, 97), ids[:, 1:].reshape(-1)
        )
        parameters = dict(model.named_parameters())
        wanted = torch.autograd.grad(loss, list(parameters.values()))
        out.loss.backward()
        for (key, parameter), gradient in zip(parameters.items(), wanted, strict=True):
            assert relative(parameter.grad, gradient) < 1e-4, key


@pytest.mark.parametrize("name", SMALL)
def test_prefill_and_single_steps_are_the_full_pass(name):
    model = create(SMALL[name], seed=7).eval()
    for prefill in (1, 3, 65):
        ids = tokens(2, prefill + 8)
        with torch.no_grad():
            out = model(ids[:, :prefill], use_cache=True)
            pieces = [out.logits]
            for t in range(prefill, prefill + 8):
                out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
                pieces.append(out.logits)
        assert relative(torch.cat(pieces, 1), logits(model, ids)) < 1e-5


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_rows_alone(name, side):
    model = create(SMALL[name], seed=7).eval()
    rows = [tokens(length) for length in (70, 1, 64, 33)]
    ids, mask = torch.zeros(4, 70, dtype=torch.long), torch.zeros(4, 70, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(70 - len(row), 70) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            assert relative(padded[i][mask[i].bool()], model(row[None]).logits[0]) < 1e-5


@pytest.mark.parametrize("name", FLA)
def test_packed_sequences_are_those_sequences_alone(name):
    model, lengths = create(SMALL[name], seed=7).eval(), (5, 1, 80)
    rows = [tokens(length) for length in lengths]
    bounds = torch.tensor([0, 5, 6, 86], dtype=torch.int32)
    with torch.no_grad():
        together = model(torch.cat(rows)[None], cu_seqlens=bounds).logits[0].split(lengths)
        for row, packed in zip(rows, together, strict=True):
            assert relative(packed, model(row[None]).logits[0]) < 1e-5


def test_the_fused_loss_of_the_config_trains_the_same():
    ids = tokens(2, 50)
    losses = []
    for fused in ({}, {"fuse_linear_cross_entropy": True, "fuse_cross_entropy": False}):
        model = create({**SMALL["delta_net"], **fused}, seed=7).train()
        losses.append(model(ids, labels=ids).loss)
    torch.testing.assert_close(losses[0], losses[1])
