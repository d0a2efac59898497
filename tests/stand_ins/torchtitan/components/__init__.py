"""Checkpoints alone."""
