"""Save and load model and optimizer with torch.distributed.checkpoint, sharded, on any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from meshtune.checkpoint import folder
from meshtune.checkpoint.background import Background
from meshtune.checkpoint.loading import first_cause, load_state, stored_tensors
from meshtune.checkpoint.space import bytes_needed, refuse_full
from meshtune.checkpoint.staging import stage
from meshtune.checkpoint.state import Kept, OptimizerState, model_state
from meshtune.checkpoint.storage import Writer
from meshtune.errors import CheckpointError


class Checkpointer:
    """Writes a run's checkpoints: beside, then renamed when complete. Every rank calls every method but `failed` and
    `completed`.

    Make it when the weights are in place and before the first step. With a `group` of gloo that nothing else uses, saving
    is asynchronous: the state is copied, and written by a thread that talks to the other ranks' over this group. Of the model's
    tensors those whose names are `kept` are written, and loaded; None: all.
    """

    def __init__(
        self,
        run: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        keep: int | None,
        group: dist.ProcessGroup | None = None,
        kept: Kept | None = None,
    ):
        self._run, self._model, self._keep, self._group, self._kept = run, model, keep, group, kept
        self._optimizer = OptimizerState(model, optimizer)
        self._nbytes = bytes_needed(model, optimizer, kept)
        self._background = Background()
        self._completed: list[Path] = []

    def save(self, step: int, facts: dict[str, Any], best: folder.Best | None = None) -> Path:
        """Write `checkpoints/step-<step>`; `facts` go to its manifest, and `best` says which checkpoint is kept beside the
        newest ones.

        Raises CheckpointError on every rank if any rank could not write, or, asynchronous, if the save before could not be
        written. The checkpoints before it stay as they are until it is complete; then those beyond `keep` go.
        """
        self.finish()
        beside = self._on_first_rank(step, lambda: self._begin(step))
        with self._optimizer.at_rest() as training:
            state = {**model_state(self._model, self._kept), **self._optimizer.held().tensors(), **training}
            if self._group is None:
                self._write(state, beside, step, facts, best)
            else:
                copy = stage(state)
                self._background.start(lambda: self._write(copy, beside, step, facts, best))
        return folder.path_of(self._run, step)

    def finish(self, patience: float | None = None) -> None:
        """Wait until nothing is being written, at most `patience` seconds. Raises what an asynchronous save has raised."""
        self._background.finish(patience)

    @property
    def failed(self) -> bool:
        """Whether an asynchronous save is known to have failed; `finish` then raises why, on every rank."""
        return self._background.failed

    def completed(self) -> list[Path]:
        """The checkpoints that have become complete since this was last asked."""
        found, self._completed = self._completed, []
        return found

    def load(self, path: Path) -> dict[str, Any]:
        """Fill model and optimizer from a complete checkpoint, whatever layout wrote it. Returns its manifest.

        Raises CheckpointError naming every tensor that only one of them has.
        """
        complete = folder.read(path)
        stored = stored_tensors(path)
        self._optimizer.make(stored)
        with self._optimizer.at_rest() as training:
            held = self._optimizer.held()
            load_state({**model_state(self._model, self._kept), **held.tensors(), **training}, path, stored)
            held.filled()
        return complete.manifest

    def _begin(self, step: int) -> Path:
        refuse_full(self._run, self._nbytes)
        return folder.begin(self._run, step)

    def _write(
        self,
        state: Mapping[str, Tensor],
        beside: Path,
        step: int,
        facts: dict[str, Any],
        best: folder.Best | None,
    ) -> None:
        reason, writer = None, Writer(beside)
        try:
            dcp.save(dict(state), storage_writer=writer, process_group=self._group)
        except (CheckpointException, OSError) as error:
            reason = first_cause(error)
        self._raise_together(step, reason, beside)
        checksums = self._united(writer.checksums)
        path = self._on_first_rank(step, lambda: folder.publish(beside, step, facts, checksums), beside)
        self._completed.append(path)
        self._on_first_rank(step, lambda: folder.retain(self._run, self._keep, best))

    def _united(self, checksums: dict[str, str]) -> dict[str, str]:
        """Those of the files of all ranks."""
        gathered: list[dict[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, checksums, group=self._group)
        return {name: value for own in gathered for name, value in own.items()}

    def _on_first_rank(self, step: int, work: Callable[[], Any], beside: Path | None = None) -> Any:
        """The result of `work` on rank 0, for every rank; every rank raises if it could not be done."""
        outcome: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                outcome[0] = work()
            except OSError as error:
                outcome[1] = f"rank 0: {error}"
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        self._raise_together(step, outcome[1], beside)
        return outcome[0]

    def _raise_together(self, step: int, reason: str | None, beside: Path | None) -> None:
        """If any rank has a reason, every rank raises with the first one; what the attempt has written is removed."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason, group=self._group)
        first = next((text for text in reasons if text), None)
        if first is None:
            return
        message = [""]
        if dist.get_rank() == 0:
            if beside is not None:
                folder.discard(beside)
            path, free = folder.path_of(self._run, step), shutil.disk_usage(self._run).free
            message[0] = (
                f"the checkpoint {path} could not be written: {first}. It needs about {self._nbytes:,} bytes, and the disk "
                f"has {free:,} bytes free. The checkpoints before it are complete; the same command continues from them"
            )
        dist.broadcast_object_list(message, src=0, group=self._group)
        error = CheckpointError(message[0])
        error.shared = True
        raise error
