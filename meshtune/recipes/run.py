"""Train by a recipe: build the parts top to bottom, call fit, export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.checkpoint import checkpoint, folder as checkpoint_folder
from meshtune.errors import CheckpointError
from meshtune.layout.world import World, connect
from meshtune.recipes import folder, planning
from meshtune.recipes.recipe import Recipe
from meshtune.training.signals import SignalStop
from meshtune.training.state import TrainState

if TYPE_CHECKING:
    import torch

    from meshtune.data.dataset import TokenDataset
    from meshtune.models.causal_lm import CausalLM
    from meshtune.models.proofs import Attention
    from meshtune.recipes.planning import Plan


@dataclass(frozen=True)
class RunResult:
    """What a run left: its folder, its export if there is one, and where it stood at the end."""

    run: Path
    export: Path | None
    state: TrainState


def cache_folder() -> Path:
    """`$MESHTUNE_CACHE`, else `~/.cache/meshtune`."""
    return Path(os.environ.get("MESHTUNE_CACHE") or Path.home() / ".cache" / "meshtune")


def run(
    recipe: Recipe,
    device: str | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    started: Any = None,
) -> tuple[RunResult, CausalLM]:
    """Train on the ranks of this world. `weights` replace the checkpoint's (names and shapes of the model).

    `started` is called once when setup is over and training begins: from then on an error is a failure in training.
    """
    world = connect(device)
    with SignalStop() as stop:
        setup = Setup(recipe, world)
        parts, state, reporter = setup.parts(stop, weights)
        if started is not None:
            started()
        return setup.train(parts, state, reporter), setup.model


class Setup:
    """Everything between a recipe and its loop, in the order in which it is built."""

    def __init__(self, recipe: Recipe, world: World):
        from meshtune.models import proofs

        self.world = world
        self.plan: Plan = world.all_together(lambda: planning.plan(recipe, world.size, world.device.type))
        self.recipe = self.plan.recipe
        self.layout = self.plan.layout.connect()
        self.precision, self.peak_flops = world.from_first(lambda: choose_compute(self.recipe, world.device))
        self.attention: Attention = world.from_first(
            lambda: proofs.choose_attention(
                self.plan.source, self.recipe.data.packing, world.device, compute_dtype(self.precision), cache_folder() / "proofs"
            )
        )
        self.train_data, self.validation_data = world.each_node_first(lambda: prepare(self.plan))
        self.run = Path(self.recipe.checkpoint.dir or "")

    def parts(self, stop: SignalStop, weights: Mapping[str, torch.Tensor] | None) -> tuple:
        """The model in its shards, and everything else that the loop needs."""
        from meshtune.recipes import assembly

        resume = self._resume()
        self._say_setup(resume)
        self.model, parallel = assembly.build_model(self, weights, skip_values=resume is not None)
        return assembly.assemble(self, parallel, stop, resume)

    def train(self, parts: Any, state: TrainState, reporter: Any) -> RunResult:
        from meshtune.training.loop import fit

        state = fit(parts, state, [reporter])
        target = self.run / "export" if self.recipe.checkpoint.exports_at_end else None
        if target is not None:
            self.export(target)
        return RunResult(self.run, target, state)

    def export(self, target: Path) -> None:
        """Write the model as it is now in Hugging Face form. Every rank must call it."""
        import torch

        from meshtune.models.export import export

        asked = self.recipe.checkpoint.export_dtype
        dtype = None if asked == "auto" else getattr(torch, asked)
        export(self.model.model, self.plan.source, self.plan.tokenizer, target, dtype)

    def _resume(self) -> checkpoint_folder.Complete | None:
        """The checkpoint to continue from; writes the run folder's facts, once it is known to be this recipe's."""

        def prepare_folder() -> checkpoint_folder.Complete | None:
            resume = folder.find_resume(self.recipe, self.run)
            if resume is not None:
                self._check_resumable(resume)
            facts = self.train_data.report.as_dict()
            if self.validation_data is not None:
                facts = {"train": facts, "validation": self.validation_data.report.as_dict()}
            layout = {**self.layout.describe(), "attention": self.attention.description, "precision": self.precision}
            folder.write_facts(self.run, self.recipe, layout, facts)
            return resume

        return self.world.from_first(prepare_folder)

    def _check_resumable(self, resume: checkpoint_folder.Complete) -> None:
        made_by = resume.path.parent.parent
        for line in folder.changes(folder.resolved_recipe(made_by), self.recipe):
            print(f"resuming with a change: {line}", flush=True)
        fingerprint = resume.manifest.get("data")
        if fingerprint != self.train_data.fingerprint:
            raise CheckpointError(
                f"{resume.path} was trained on other data (its rows, tokenizer or lengths have changed since); restore them, or "
                "name another checkpoint.dir"
            )

    def _say_setup(self, resume: checkpoint_folder.Complete | None) -> None:
        if not self.world.is_first:
            return
        lines = [
            f"run folder  {self.run}",
            f"layout      {self.layout.summary()}",
            f"batch       {self.plan.sizes.summary()}",
            f"attention   {self.attention.description}" + self._chosen(self.recipe.model.attention),
            f"precision   {self.precision} compute" + self._chosen(self.recipe.training.precision),
            *(f"data        {line}" for line in self.train_data.report.summary()),
        ]
        if self.validation_data is not None:
            lines += [f"validation  {line}" for line in self.validation_data.report.summary()]
        if self.plan.source.master_dtype != _float32():
            lines.append(f"WARNING     weights are held in {self.recipe.model.dtype}: updates below its rounding are lost")
        if resume is not None:
            lines.append(f"resuming    from {resume.path}, after step {resume.step}")
        print("\n".join(lines), flush=True)

    @staticmethod
    def _chosen(asked: str) -> str:
        return " (chosen by auto)" if asked == "auto" else ""


def choose_compute(recipe: Recipe, device: torch.device) -> tuple[str, float | None]:
    """The compute precision, and the peak FLOP/s of one device in it, for the MFU."""
    from meshtune.observe import choose_precision, device_peak_flops

    asked = recipe.training.precision
    if asked == "auto" and recipe.model.dtype == "bfloat16":
        asked = "bf16"
    if asked != "auto" and device.type == "cuda":
        return asked, device_peak_flops(device, compute_dtype(asked))
    choice, measured = choose_precision(device)
    asked = choice if asked == "auto" else asked
    stated = device_peak_flops(device, compute_dtype(asked))
    return asked, stated or measured[asked]


def compute_dtype(precision: str) -> torch.dtype:
    import torch

    return torch.bfloat16 if precision == "bf16" else torch.float32


def prepare(plan: Plan) -> tuple[TokenDataset, TokenDataset | None]:
    """The tokenised training and validation rows."""
    from meshtune.data.prepare import prepare_training, prepare_validation

    section, tokenizer, length = plan.recipe.data, plan.tokenizer, plan.max_seq_length
    cache = cache_folder() / "data"
    return prepare_training(section, tokenizer, length, cache), prepare_validation(section, tokenizer, length, cache)


def _float32() -> torch.dtype:
    import torch

    return torch.float32
