"""The options of `statecut evaluate`, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from statecut.arguments import DEVICE, TEXT, check_counts, check_run, option
from statecut.data.sources import text_files
from statecut.errors import InputError
from statecut.hub import model_folder
from statecut.models.description import ModelFolder


@dataclass(frozen=True)
class EvaluationRequest:
    """A model folder, and what to evaluate it on: a text, lm-eval's tasks, or both."""

    model: Path | str
    text: Path | str | None = option(None, f"its perplexity: {TEXT}", metavar="FILE")
    tasks: str | None = option(None, "of lm-eval, as wikitext,lambada_openai", metavar="NAMES")
    include_path: Path | str | None = option(
        None, "folder with task files of your own, for --tasks", metavar="FOLDER")  # fmt: skip
    limit: int | None = option(None, "documents per task (default: all)", metavar="N")
    sequences: int = option(16, "of --text", metavar="N")
    length: int = option(2048, "tokens per sequence, and of lm-eval's window", metavar="N")
    batch: int = option(8, "sequences per batch", metavar="N")
    seed: int = option(0, "of the order of the text")
    device: str | None = option(None, DEVICE)

    def check(self) -> None:
        if self.text is None and self.tasks is None:
            raise InputError("what to evaluate is missing: give --text FILE, --tasks NAMES or both")
        check_counts(sequences=self.sequences, batch=self.batch, limit=self.limit)
        check_run(self.length, self.seed, self.device)
        if self.text is not None:
            text_files(Path(self.text))
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise InputError(f"--include-path {self.include_path}: no such folder")
        ModelFolder(model_folder(self.model)).check_runs()
