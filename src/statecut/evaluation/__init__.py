"""Perplexity of a text."""
