"""How jobs run: log, provenance, GPUs, Slurm, and the paths of their results."""
