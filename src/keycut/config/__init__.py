"""The configuration of a run: what is trained, pruned, measured and printed.

One YAML file describes one run. Everything in it has a name, things refer to each other by name,
and what a table needs (`Config.variants`, `Config.evaluations`, `Config.measurements`) follows
from the file alone, so that the workflow and the plan ask the same functions. How and where a run
is computed (GPUs, memory, time) is no part of it.

`python -m keycut.config` writes config/schema.json and config/README.md from these models.
"""

from keycut.config.benchmarks import (
    DecodingBenchmark,
    MixerBenchmark,
    ModelBenchmark,
    Preflight,
)
from keycut.config.evaluation import TASKS, Evaluation, Suite, Task
from keycut.config.figures import (
    Figure,
    FilterFigure,
    QualityFigure,
    RankFigure,
    SpectrumFigure,
    SweepFigure,
    UtilizationFigure,
)
from keycut.config.models import Model, Shape, shape_of, state_bytes
from keycut.config.pruning import BASELINE, CalibrationText, width
from keycut.config.reading import load_config, parse_config
from keycut.config.run import Config, JobConfig, Measurement, Variant
from keycut.config.section import Kernel, Stage
from keycut.config.sources import Corpus, HubCorpus, LocalCorpus
from keycut.config.tables import DecodingTable, QualityTable, SpeedTable
from keycut.config.training import Recipe
