"""The demo's own text: prose, enough of it, and always the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from reproduction import documentation as own
from reproduction.documentation import documentation_parts, part_of, prose

DOCSTRING = """Return the sum of array elements over a given axis, as one number.

    Elements to sum. A second sentence on :func:`numpy.sum <other>` and `a`
    that goes on over **two** lines, with ``code`` in it [1]_.

    Parameters
    ----------
    axis : None or int or tuple of ints, optional and then some more
        Axis along which the sum is performed, see `the guide <https://x.y>`_.
    See Also
    --------
    numpy.add.reduce : Equivalent functionality of add and more of it.

    >>> np.sum([0.5, 1.5]) and a number of other words that follow here.
    2.0

    .. versionadded:: 1.7.0 and this line is not a sentence of the text.
    .. math:: x = \\sum_i (a_i + b_i) * c_{i, j} / (d_i - 1) + \\exp(k_i) / 2.
    Too short to keep.
"""


def test_what_reads_as_sentences_is_kept_and_nothing_else() -> None:
    assert list(prose(DOCSTRING)) == [
        "Return the sum of array elements over a given axis, as one number.",
        "Elements to sum. A second sentence on numpy.sum and a that goes on over two lines, "
        "with code in it.",
        "Axis along which the sum is performed, see the guide.",
    ]


def test_a_paragraph_like_one_of_a_part_before_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the versions of a package change, a file stays in its part."""
    files = {
        "training": "numpy/linalg/_linalg.py",
        "calibration": "scipy/stats/_stats_py.py",
        "held_out": "scipy/linalg/blas.py",
    }
    assert all(part_of(file) == part for part, file in files.items())
    of_training = "the sum of all elements along one axis of it."
    of_calibration = "the shape of an array as a tuple of integers."
    new = "A sentence of eight or more words, unlike any."
    texts = [
        (files["held_out"], f"{new}\n\nGive {of_training}\n\nGive {of_calibration}"),
        (files["calibration"], f"Return {of_training}\n\nReturn {of_calibration}"),
        (files["training"], f"Compute at once {of_training}"),
    ]
    monkeypatch.setattr(own, "_texts", lambda: texts)
    assert documentation_parts() == {
        "training": [texts[2][1]],
        "calibration": [f"Return {of_calibration}"],
        "held_out": [new],
    }


def test_it_is_the_same_in_every_process_without_importing_the_packages() -> None:
    program = (
        "import hashlib, sys; from reproduction import documentation as own;"
        "own.PACKAGES = ('numpy',); own.documentation_source();"
        "print(hashlib.sha256(repr([*own.paragraphs()]).encode()).hexdigest());"
        "assert not {'torch', 'scipy', 'pandas'} & set(sys.modules)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
