"""What a run costs, before anything runs: jobs, GPU hours, wall time and disk, rule by rule.

Snakemake's dry run gives the jobs (`graph`), the configuration what each has to do (`work`), and a
file of measured figures how long that takes (`costs`): the nearest figure, scaled, and said so.
"""
