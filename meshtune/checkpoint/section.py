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
    every_minutes: float | None = Field(
        None, gt=0, description="Save where so many minutes have passed since the last checkpoint."
    )
    asynchronous: bool = Field(
        False,
        description="Copy the state and go on training while the copy is written. Takes as much host memory as a rank's part of "
        "the checkpoint.",
    )
    keep: int | None = Field(3, ge=1, description="Newest checkpoints kept. null: all of them.")
    best_metric: str | None = Field(
        None,
        description="A metric of a validation, as metrics.jsonl names it (`validation_loss`, `validation_<set>_token_accuracy`). "
        "Each validation that is the best one so far is followed by a checkpoint, which is kept beside the newest ones and "
        "named by `checkpoints/best.json`.",
    )
    export: bool | Literal["final", "best", "none", "all"] = Field(
        "final",
        description="`final` (or true) writes `export/` in Hugging Face form at the end (of a run that trains an adapter, the "
        "adapter's folder in PEFT's form), with the weights after the last step; "
        "`best` with those of the best checkpoint, by `best_metric`; `all` as `final`, and also one beside each checkpoint; "
        "`none` (or false) none.",
    )
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="`auto` keeps each tensor's dtype of the checkpoint that the model came from; of an adapter, the one it is "
        "trained in.",
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
        if self.export == "best" and self.best_metric is None:
            yield (
                "export",
                "`best` needs checkpoint.best_metric, such as validation_loss, which says what is the best one",
            )
        if self.asynchronous and self.export == "all":
            yield (
                "asynchronous",
                "does not go with `export: all`, which waits for each checkpoint; write `export: final`",
            )

    @property
    def exports_at_end(self) -> bool:
        return self.export not in (False, "none")

    @property
    def resume_from(self) -> str:
        """`auto`, `never`, or a path."""
        if isinstance(self.resume, bool):
            return "auto" if self.resume else "never"
        return self.resume
