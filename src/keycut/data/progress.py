"""One line on stderr now and then, for work that takes longer than ten seconds."""

from __future__ import annotations

import sys
import time

_EVERY = 10.0  # seconds


class Progress:
    """Counts documents and tokens as they pass, and says how it stands every ten seconds."""

    def __init__(self, work: str, *, tokens: int | None = None) -> None:
        self.work = work
        self.expected = tokens
        self.documents = 0
        self.tokens = 0
        self._start = self._said = time.monotonic()

    def add(self, *, documents: int = 0, tokens: int = 0) -> None:
        self.documents += documents
        self.tokens += tokens
        now = time.monotonic()
        if now - self._said >= _EVERY:
            self._said = now
            print(self.line(now - self._start), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        said = []
        if self.documents:
            said.append(f"{self.documents:,} documents")
        if self.tokens:
            said += [f"{self.tokens:,} tokens", f"{self.tokens / seconds:,.0f} tokens/s"]
        if self.tokens and self.expected is not None:
            left = max(0, self.expected - self.tokens) * seconds / self.tokens
            said.append(f"{left:,.0f} s left")
        return f"{self.work}: {', '.join(said)}"
