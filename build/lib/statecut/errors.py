"""The one kind of error that is the user's to mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(Exception):
    """Something given to Statecut is wrong. The message names the thing, the value, what was
    expected and what to do; the command line prints it alone and exits with 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name closest to `name`, or the whole list."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
