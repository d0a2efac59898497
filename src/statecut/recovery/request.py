"""The options of `statecut recover`, and what can be known without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from statecut.arguments import DEVICE, TEXT, check_counts, check_run, option
from statecut.data.sources import text_files
from statecut.errors import InputError
from statecut.files import check_writable
from statecut.hub import model_folder
from statecut.models.description import ModelFolder
from statecut.pruning.request import FORCE, check_out
from statecut.recovery.settings import Recovery


@dataclass(frozen=True)
class RecoveryRequest:
    """A pruned model, refitted or not, the model that it was cut from, and how to train it."""

    model: Path | str
    teacher: Path | str
    out: Path | str
    text: Path | str | None = option(None, f"to train on: {TEXT}", metavar="FILE")
    steps: int = option(2000, "of training", metavar="N")
    batch: int = option(16, "sequences per step", metavar="N")
    gradient_accumulation_steps: int = option(
        2, "passes that a step's sequences are divided into: more need less memory", metavar="N"
    )
    length: int = option(2048, "tokens per sequence", metavar="N")
    epochs: int = option(1, "passes over the text: more need less of it", metavar="N")
    learning_rate: float = option(1e-4, "peak", metavar="RATE")
    seed: int = option(42, "of adapters and the text's order")
    device: str | None = option(None, DEVICE)
    force: bool = option(False, FORCE)  # fmt: skip

    @property
    def settings(self) -> Recovery:
        return Recovery(
            data=Path(str(self.text)).name,
            steps=self.steps,
            batch=self.batch,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            warmup=self.steps // 20,
            seed=self.seed,
        )

    @property
    def checkpoints(self) -> Path:
        return Path(self.out).with_name(f"{Path(self.out).name}.checkpoints")

    def check(self) -> None:
        names = ("steps", "batch", "epochs", "gradient_accumulation_steps")
        check_counts(**{name: getattr(self, name) for name in names})
        if self.batch % self.gradient_accumulation_steps:
            raise InputError(
                f"--gradient-accumulation-steps {self.gradient_accumulation_steps}: must divide "
                f"--batch {self.batch}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"--learning-rate {self.learning_rate}: must be a number above 0")
        check_run(self.length, self.seed, self.device)
        if self.text is None:
            raise InputError(f"the text to train on is missing: give --text FILE ({TEXT})")
        text_files(Path(self.text))
        student, teacher = (ModelFolder(model_folder(m)) for m in (self.model, self.teacher))
        student.check_runs()
        student.check_narrower(teacher)
        check_out(Path(self.out), [student.folder, teacher.folder], self.text, force=self.force)
        check_writable(self.checkpoints, folder=True)
