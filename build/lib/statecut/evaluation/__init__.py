"""Perplexity of a text, and lm-eval's model interface."""
