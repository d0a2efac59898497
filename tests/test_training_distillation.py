"""The losses in slices are the losses of whole logits."""

import pytest
import torch
import torch.nn.functional as F

from statecut.recovery.distillation import IGNORED, distillation_losses, next_tokens

TOKENS = (3, 11)


def materialised(hidden, head, teacher_hidden, teacher_head, targets, temperature, weight):
    """As it is defined, with both sets of logits in memory."""
    logits, teacher = hidden @ head.T, teacher_hidden @ teacher_head.T
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    p, q = (teacher / temperature).softmax(-1), (logits / temperature).softmax(-1)
    kd = temperature**2 * (p * (p.log() - q.log())).sum(-1).mean()
    return ce + weight * kd, ce, kd


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    ids = torch.randint(0, 29, TOKENS, generator=generator)
    head = draw(29, 8).detach()
    return draw(*TOKENS, 8), head, draw(*TOKENS, 5), draw(29, 5), next_tokens(ids)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("tokens_at_once", [1, 7, 1000])
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_slices_give_the_same_losses_and_gradients(temperature, tokens_at_once, weight):
    """The last token has no target, and nothing flows to the teacher."""
    assert next_tokens(torch.arange(6).view(2, 3)).tolist() == [[1, 2, IGNORED], [4, 5, IGNORED]]
    given = inputs(tokens_at_once)
    found = distillation_losses(*given, temperature, weight, tokens_at_once)
    expected = materialised(*given, temperature, weight)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, check_dtype=False)
    (gradient,) = torch.autograd.grad(2 * expected[0], given[0])
    (2 * found[0]).backward()
    torch.testing.assert_close(given[0].grad, gradient, rtol=1e-5, atol=1e-7)
    assert all(teacher.grad is None for teacher in given[2:4])


def test_no_tensor_has_the_logits_of_all_tokens():
    """What autograd keeps for the backward pass is small, whatever the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 64, 8, generator=generator, requires_grad=True)
    head = torch.randn(5000, 8, generator=generator)
    ids = torch.randint(0, 5000, (4, 64), generator=generator)
    largest = 0

    def keep(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _, _ = distillation_losses(
            hidden, head, hidden.detach(), head, next_tokens(ids), 2.0, 1.0, 16
        )
        loss.backward()
    assert largest <= hidden.numel()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 is slower
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_mixed_precision_only_rounding_differs(dtype):
    """As a GPU trains: autocast, a frozen head in float32, a teacher in bf16."""
    hidden, head, taught, taught_head, targets = inputs()
    head, taught, taught_head = head.float(), taught.bfloat16(), taught_head.bfloat16()
    x = hidden.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, *_ = distillation_losses(x, head, taught, taught_head, targets, 2.0, 1.0, 7)
    (found,) = torch.autograd.grad(loss, x)
    exact = x.detach().double().requires_grad_()
    others = (tensor.double() for tensor in (head, taught, taught_head))
    expected, *_ = materialised(exact, *others, targets, 2.0, 1.0)
    (gradient,) = torch.autograd.grad(expected, exact)
    assert found.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    assert (found - gradient).norm() < 0.01 * gradient.norm()
