"""Where a run leaves its model, and what it keeps until then."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statecut.data.packing import PackedTokens
from statecut.files import atomic_write, check_output_path
from statecut.models.checkpoint import save
from statecut.recovery.checkpoints import Checkpoints
from statecut.recovery.loop import EVERY_TEN_MINUTES, Saving
from statecut.version import __version__


@dataclass(frozen=True)
class Output:
    """The folder of a trained model, and how its run survives until that is written."""

    folder: Path | str
    checkpoints: Path | str  # where all running jobs keep theirs
    tokenizer: Path | str | None = None  # a folder to copy its files from
    files: Mapping[str, str] = field(default_factory=dict)  # texts to put beside the model
    saving: Saving = EVERY_TEN_MINUTES
    force: bool = False  # replace the folder if it exists
    version: int = 1  # of the code: with another one a run begins anew

    def check(self) -> None:
        check_output_path(self.folder, force=self.force, folder=True)

    def checkpoints_of(self, work: str, data: PackedTokens, **defining: Any) -> Checkpoints:
        """Those of one run, which is identified by all that defines it."""
        text = {"sha256": data.manifest.sha256, "sequences": len(data)}
        run = {"work": work, **defining, "data": text, "version": self.version}
        return Checkpoints(self.checkpoints, {**run, "statecut": __version__})

    def write(self, model: Any, checkpoints: Checkpoints, files: Iterable[Path] = ()) -> None:
        """The model with the loss curve and other files beside it; then the checkpoints go."""
        with atomic_write(self.folder, folder=True, force=self.force) as aside:
            save(model, aside, tokenizer=self.tokenizer, files=self.files, force=True)
            for path in (checkpoints.curve, *files):
                shutil.copyfile(path, aside / path.name)
        checkpoints.remove()
