"""The `logging` section of a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.observe.progress import Progress, make_progress
from meshtune.observe.sinks import JSONLSink, Sink, TensorBoardSink


class LoggingSection(Section):
    """What a run records about itself, and what it shows while it runs."""

    every_steps: int = Field(
        default=1,
        ge=1,
        description="Write and show the metrics each time this many optimizer steps are done, and at the last step.",
    )
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard event files, to `tensorboard/` in the run folder."
    )
    progress: Literal["auto", "rich", "plain", "none"] = Field(
        default="auto",
        description="What rank 0 shows: `rich` a live display, `plain` one line a logging step, `none` "
        "nothing, `auto` the live display on a terminal and plain lines elsewhere.",
    )

    def build_sinks(self, run_dir: str | os.PathLike[str], resume_step: int | None) -> list[Sink]:
        """The sinks of rank 0, writing into `run_dir`; `resume_step` as in `JSONLSink` (0 for a new run).

        Raises `MeshtuneError` where TensorBoard is asked for and not installed; nothing is touched then.
        """
        sinks: list[Sink] = []
        if self.tensorboard:
            sinks.append(TensorBoardSink(Path(run_dir) / "tensorboard", resume_step))
        return [JSONLSink(Path(run_dir) / "metrics.jsonl", resume_step), *sinks]

    def build_progress(self, rank: int) -> Progress:
        """The display of this process; silent on any rank but 0."""
        return make_progress(self.progress if rank == 0 else "none")
