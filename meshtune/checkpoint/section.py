"""`checkpoint:`, what is kept of a run and where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.config import Section


class CheckpointSection(Section):
    """The run folder, and how often it gets a checkpoint."""

    dir: str | None = Field(
        None,
        description="The run folder. Default: `runs/<model>-<recipe>-<hash of the recipe>`, printed.",
    )
    every_steps: int | None = Field(
        None, gt=0, description="Save every so many optimizer steps; the last step is always saved."
    )
    keep: int | None = Field(3, ge=1, description="Newest checkpoints kept. null: all of them.")
    export: bool | Literal["final", "none", "all"] = Field(
        "final",
        description="`final` (or true) writes `export/` in Hugging Face form at the end; `all` also one beside each "
        "checkpoint; `none` (or false) none.",
    )
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`auto` keeps each tensor's dtype of the checkpoint that the model came from."
    )
    resume: bool | str = Field(
        "auto",
        description="`auto` (or true) continues from the newest complete checkpoint of the run folder, if there is "
        "one; `never` (or false) starts anew and refuses a run folder that holds checkpoints; a path "
        "(`.../checkpoints/step-N`) continues from that checkpoint, each time, and sets later ones of the run folder "
        "aside.",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.export in (False, "none") and self.export_dtype != "auto":
            yield "export_dtype", "has no effect with `export: none`"

    @property
    def exports_at_end(self) -> bool:
        return self.export in (True, "final", "all")

    @property
    def resume_from(self) -> str:
        """`auto`, `never`, or a path."""
        if isinstance(self.resume, bool):
            return "auto" if self.resume else "never"
        return self.resume
