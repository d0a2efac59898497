"""The configuration of a run: what is trained, pruned, measured and printed.

One YAML file describes one run. Everything in it has a name, things refer to each other by name,
and what a table needs (`Config.variants`, `Config.evaluations`, `Config.measurements`) follows
from the file alone, so that the workflow and the plan ask the same functions. How and where a run
is computed (GPUs, memory, time) is no part of it.

`python -m keycut.config` writes config/schema.json and config/README.md from these models.
"""

from keycut.config.benchmarks import (
    Benchmark,
    DecodingBenchmark,
    Mixer,
    MixerBenchmark,
    ModelBenchmark,
    Preflight,
)
from keycut.config.documentation import reference, schema
from keycut.config.evaluation import TASKS, Evaluation, Suite, Task
from keycut.config.figures import (
    Analysis,
    Figure,
    FilterFigure,
    QualityFigure,
    RankFigure,
    SpectrumFigure,
    SweepFigure,
    UtilizationFigure,
)
from keycut.config.models import Model, Pretrained, Shape, shape_of
from keycut.config.pruning import BASELINE, Calibration, width
from keycut.config.reading import load_config, parse_config
from keycut.config.run import Config, JobConfig, Measurement, Variant
from keycut.config.section import Kernel, Pass, Section, Stage, Target
from keycut.config.sources import (
    Corpus,
    DocumentationCorpus,
    FromDisk,
    FromHub,
    HubCorpus,
    LocalCorpus,
    Tokenizer,
    TrainedTokenizer,
)
from keycut.config.tables import DecodingTable, QualityTable, SpeedTable, Table
from keycut.config.training import Distillation, Lora, Recipe, Recovery, Training

__all__ = [
    "BASELINE",
    "TASKS",
    "Analysis",
    "Benchmark",
    "Calibration",
    "Config",
    "Corpus",
    "DecodingBenchmark",
    "DecodingTable",
    "Distillation",
    "DocumentationCorpus",
    "Evaluation",
    "Figure",
    "FilterFigure",
    "FromDisk",
    "FromHub",
    "HubCorpus",
    "JobConfig",
    "Kernel",
    "LocalCorpus",
    "Lora",
    "Measurement",
    "Mixer",
    "MixerBenchmark",
    "Model",
    "ModelBenchmark",
    "Pass",
    "Preflight",
    "Pretrained",
    "QualityFigure",
    "QualityTable",
    "RankFigure",
    "Recipe",
    "Recovery",
    "Section",
    "Shape",
    "SpectrumFigure",
    "SpeedTable",
    "Stage",
    "Suite",
    "SweepFigure",
    "Table",
    "Target",
    "Task",
    "Tokenizer",
    "TrainedTokenizer",
    "Training",
    "UtilizationFigure",
    "Variant",
    "load_config",
    "parse_config",
    "reference",
    "schema",
    "shape_of",
    "width",
]
