"""Pretraining: flame, as the paper used, and a built-in trainer."""
