"""The kernel of the distillation loss, by Triton's interpreter, against plain PyTorch."""

import os
import subprocess
import sys

COMPARE = """
import torch
from statecut.recovery import distillation, distillation_kernel

torch.manual_seed(0)
cases = (7, 29, 2, 0.7), (3, 4096, 1, 0), (5, 9001, 0.5, 2)
for tokens, vocabulary, temperature, weight in cases:
    logits, teacher = 3 * torch.randn(2, tokens, vocabulary)
    targets = torch.randint(vocabulary, (tokens,))
    targets[1] = distillation.IGNORED
    given = teacher, targets, temperature, (torch.tensor(1 / 6), weight / 7)
    expected = distillation.losses_and_gradient(logits, *given)
    found = distillation_kernel.losses_and_gradient(logits.clone(), *given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    print("compared")
"""


def test_it_is_the_plain_one():
    """In a process of its own: the interpreter is asked for before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["compared"] * 3, done.stderr
