"""Suites of lm-eval tasks on a model folder, by a protocol that is checked first."""
