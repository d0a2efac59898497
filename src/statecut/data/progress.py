"""How far long work is, and how long it still takes: one line that changes in place on a terminal,
elsewhere a log line each minute."""

from __future__ import annotations

import logging
import sys
import time

logger = logging.getLogger(__name__)

EVERY = 60.0  # seconds between log lines
REDRAWN = 0.2  # seconds between changes of the line on a terminal


class Progress:
    """Counts documents and tokens, and shows the counts, the rate and the time left."""

    def __init__(self, work: str, *, tokens: int | None = None) -> None:
        self.work, self.expected = work, tokens
        self.documents = self.tokens = 0
        self._start = self._shown = time.monotonic()

    def add(self, *, documents: int = 0, tokens: int = 0, note: str = "") -> None:
        self.documents += documents
        self.tokens += tokens
        now = time.monotonic()
        terminal = logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()
        if now - self._shown >= (REDRAWN if terminal else EVERY):
            self._shown = now
            line = self._line(now - self._start, note)
            if terminal:
                print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
            else:
                logger.info("%s", line)
        if terminal and self.expected is not None and self.tokens >= self.expected:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

    def _line(self, seconds: float, note: str) -> str:
        counts = [note, f"{self.documents:,} documents" if self.documents else ""]
        if self.tokens:
            counts += [f"{self.tokens:,} tokens", f"{self.tokens / seconds:,.0f} tokens/s"]
            if self.expected is not None:
                left = max(0, self.expected - self.tokens) * seconds / self.tokens
                counts.append(f"{left:,.0f} s left")
        return f"{self.work}: {', '.join(filter(None, counts))}"
