"""What makes a run safe: jobs, paths, code versions, locks, GPUs, Slurm, the fork server."""
