"""Statecut: prune the key and query channels of linear-attention language models.

Importing this package is cheap on purpose: torch, transformers and flash-linear-attention are
imported by the modules that need them, not here.
"""

__version__ = "0.1.0"

# Whether `statecut prune` refits if neither --refit nor --no-refit is given. Off, because it makes
# one text of three worse for some models (docs/refit.md).
REFIT = False
