"""Progress on stderr: what the library logs, shown as plain messages."""

from __future__ import annotations

import logging
import sys


class _Stderr(logging.Handler):
    """Looks sys.stderr up for each record: a process that is forked or tested replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        # A line of progress may stand there.
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
        print(f"{clear}{self.format(record)}", file=sys.stderr, flush=True)


_HANDLER = _Stderr()


def start(*packages: str) -> None:
    """Show the library's records, and those of these packages, from INFO on, and warnings of all
    others. Safe to call twice.

    The handler is on the root logger: a library that calls `logging.warning` would otherwise
    configure the root itself, and every message would appear twice.
    """
    logging.getLogger().addHandler(_HANDLER)
    for package in ("statecut", *packages):
        logging.getLogger(package).setLevel(logging.INFO)
