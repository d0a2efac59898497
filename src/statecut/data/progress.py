"""A log line every ten seconds for work that takes longer."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_EVERY = 10.0  # seconds


class Progress:
    """Counts documents and tokens, and logs the counts, the rate and the time left."""

    def __init__(self, work: str, *, tokens: int | None = None) -> None:
        self.work, self.expected = work, tokens
        self.documents = self.tokens = 0
        self._start = self._logged = time.monotonic()

    def add(self, *, documents: int = 0, tokens: int = 0, note: str = "") -> None:
        self.documents += documents
        self.tokens += tokens
        now = time.monotonic()
        if now - self._logged < _EVERY:
            return
        self._logged, seconds = now, now - self._start
        counts = [note, f"{self.documents:,} documents" if self.documents else ""]
        if self.tokens:
            counts += [f"{self.tokens:,} tokens", f"{self.tokens / seconds:,.0f} tokens/s"]
            if self.expected is not None:
                left = max(0, self.expected - self.tokens) * seconds / self.tokens
                counts.append(f"{left:,.0f} s left")
        logger.info("%s: %s", self.work, ", ".join(filter(None, counts)))
