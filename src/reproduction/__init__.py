"""The paper "The Key to State Reduction in Linear Attention", from nothing to its tables.

What stands behind the rules of workflow/: configurations, pretraining, the paper's evaluations and
timings, reports. It uses the library, `statecut`, which knows nothing of it.
"""
