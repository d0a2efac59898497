"""The configuration of a run: what is trained, pruned, measured and printed.

One YAML file describes one run. Everything in it has a name, things refer to each other by name,
and what a table needs (`Config.variants`, `Config.evaluations`, `Config.measurements`) follows
from the file alone, so that the workflow and the plan ask the same functions. How and where a run
is computed (GPUs, memory, time) is no part of it.

`python -m reproduction.config` writes config/schema.json and config/README.md from these models.
"""

from reproduction.config.evaluation import (
    TASKS,
    DecodingBenchmark,
    Evaluation,
    MixerBenchmark,
    ModelBenchmark,
    Suite,
    Task,
)
from reproduction.config.models import Model, cut_shape, shape_of
from reproduction.config.pruning import BASELINE
from reproduction.config.reading import load_config, parse_config
from reproduction.config.run import Config, JobConfig, Measurement, Variant
from reproduction.config.section import Cut, Stage
from reproduction.config.sources import Corpus, HubCorpus, LocalCorpus
from reproduction.config.tables import (
    DecodingTable,
    Figure,
    QualityFigure,
    QualityTable,
    RankFigure,
    SpectrumFigure,
    SweepFigure,
    UtilizationFigure,
)
from reproduction.config.training import Recipe
