"""What a run costs, before anything runs: jobs, GPU hours, wall time and disk, rule by rule.

Snakemake is asked for its jobs (`graph`), the configuration for what each of them has to do
(`work`), and a small file of measured figures for how long that takes (`costs`). A figure that
nobody has measured stays unknown, and every sum that it is missing from says "at least".
"""
