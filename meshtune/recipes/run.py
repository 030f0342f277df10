"""Train by a recipe: build the parts top to bottom, call fit, export."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.checkpoint.checksums import find_sound, verify
from meshtune.checkpoint.folder import Complete, sweep
from meshtune.errors import CheckpointError
from meshtune.layout.absent import wait_at_most
from meshtune.layout.world import World, connect
from meshtune.observe import compute_dtype
from meshtune.recipes import adapting, folder, planning, precision, quantizing, rounding
from meshtune.recipes.recipe import Recipe
from meshtune.training.signals import Interrupted, SignalStop
from meshtune.training.state import TrainState

if TYPE_CHECKING:
    import torch

    from meshtune.data.opening import Finite, Tokens
    from meshtune.models.causal_lm import CausalLM
    from meshtune.models.proofs import Attention
    from meshtune.models.quantization.choosing import Chosen as Quantised
    from meshtune.models.trainable import Trained
    from meshtune.recipes.adapting import Chosen
    from meshtune.recipes.optimizing import Learning
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
    started: Callable[[], None] | None = None,
) -> tuple[RunResult, CausalLM]:
    """Train on the ranks of this world. `weights` replace the checkpoint's (names and shapes of the model); as they may be
    any, such a run gets a folder of its own unless the recipe names one.

    `started` is called once when setup is over and training begins: from then on an error is a failure in training.
    """
    world = connect(device)
    if weights is not None and recipe.checkpoint.dir is None:
        recipe = planning.in_folder(recipe, world.from_first(lambda: folder.unused(planning.default_folder(recipe))))
    with ExitStack() as held:
        setup = Setup(recipe, world, held)
        return setup.train(weights, started), setup.model


class Setup:
    """Everything between a recipe and its loop, in the order in which it is built."""

    flops_per_token: float
    """Of forward and backward; known when the model is built and not yet cut."""
    trained: Trained | None
    """What is trained, where that is not every weight; known at the same time."""
    learning: Learning
    """Which parameters learn how; known at the same time."""
    optimizer: torch.optim.Optimizer
    base: str | None
    """The fingerprint of weights that are not trained and that no checkpoint holds, where there are such."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        held: ExitStack,
        rows: Callable[[Plan], tuple[Tokens, dict[str, Finite]]] | None = None,
    ):
        """`held` keeps the lock on the run folder. `rows` gives training and validation rows that are tokens already, in
        place of those that the recipe names; validation sets by name, one alone under ""."""
        from meshtune.models import proofs
        from meshtune.recipes.plans import find_plan

        self.world, self.held = world, held
        recipe = planning.with_folder(recipe)
        self.run = Path(recipe.checkpoint.dir or "")
        self.damaged: dict[Path, str] = {}
        self.resume = find_sound(lambda known: folder.find_resume(recipe, self.run, known), world, self.damaged)
        self.recipe = folder.continued(recipe, self.resume)
        self.plan: Plan = world.all_together(lambda: planning.plan(self.recipe, world.size, world.device.type))
        self.layout = self.plan.layout.connect()
        self.precision, self.peak_flops = world.from_first(self._choose_precision)
        self.attention: Attention = world.from_first(
            lambda: proofs.choose_attention(
                self.plan.source,
                self.recipe.data.packing,
                world.device,
                compute_dtype(self.precision),
                cache_folder() / "proofs",
                longest_row=self.plan.longest_row,
                preferred=None if self.resume is None else self.resume.manifest.get("attention"),
                context=self.plan.context,
                longest_document=self.plan.max_seq_length,
            )
        )
        self.adapter: Chosen | None = world.from_first(
            lambda: adapting.choose(self.recipe, self.plan.source, self.plan.tokenizer)
        )
        self.findings = world.from_first(lambda: find_plan(self.plan.source, self.layout, self.recipe.distributed.plan))
        self.quantised: Quantised | None = world.from_first(self._choose_quantised)
        self.train_data, self.validation_data = world.each_node_first(lambda: (rows or self._prepare)(self.plan))
        self.course = world.all_together(lambda: planning.course(self.plan, self.train_data))
        self.resume, changes = world.from_first(self._open_folder)
        if world.is_first:
            print("\n".join(describe(self, changes)), flush=True)

    def train(self, weights: Mapping[str, torch.Tensor] | None, started: Callable[[], None] | None) -> RunResult:
        """Build the model in its shards and what surrounds it, run the loop, export."""
        from meshtune.models.adapters.writing import does_nothing
        from meshtune.optim.averaging import average_for_good
        from meshtune.recipes import assembly
        from meshtune.training.loop import fit
        from meshtune.training.memory import KeptMemory

        self.model, parallel = assembly.build_model(self, weights)
        stop = SignalStop()
        parts, state, reporter = assembly.assemble(self, parallel, stop)
        if self.recipe.distributed.timeout_minutes is not None:
            wait_at_most(self.recipe.distributed.timeout_minutes)
        if started is not None:
            started()
        if state.step >= parts.total_steps:
            reporter.say(
                f"nothing to do: {self.run} has {state.step} steps already, and the recipe asks for {parts.total_steps}"
            )
        with stop:
            try:
                state = fit(parts, state, [reporter, KeptMemory(self.world.device.type)])
            except Interrupted:
                # Who started the ranks ends all of them when the first has left: rank 0 may still write the report.
                self.world.all_together(lambda: None)
                raise
        average_for_good(self.optimizer)
        if self.recipe.data.streaming:
            for line in self.train_data.report.summary():
                reporter.say(line)
        target = self.run / "export" if self.recipe.checkpoint.exports_at_end else None
        if self.recipe.checkpoint.export == "best" and parts.saver is not None:
            reporter.say(f"exporting   the best checkpoint, {parts.saver.take_best(state)}")
        if target is not None and (idle := self.export(target)) and state.step:
            reporter.say(f"WARNING     {does_nothing(idle)}")
        return RunResult(self.run, target, state)

    def export(self, target: Path) -> list[str]:
        """Write the model as it is now in Hugging Face form, or its adapter in PEFT's. Every rank must call it. Returns, on the
        first, the layers whose adapter does nothing."""
        import torch

        from meshtune.models.adapters.view import adapter_of
        from meshtune.models.adapters.writing import export_adapter
        from meshtune.models.export import export

        asked, model, plan = self.recipe.checkpoint.export_dtype, self.model.model, self.plan
        dtype = None if asked == "auto" else getattr(torch, asked)
        if (adapter := adapter_of(model)) is not None:
            return export_adapter(model, adapter, plan.source, plan.tokenizer, target, dtype)
        export(model, plan.source, plan.tokenizer, target, dtype)
        return []

    def _prepare(self, plan: Plan) -> tuple[Tokens, dict[str, Finite]]:
        """Training and validation data as tokens; of a stream, its first rows."""
        from meshtune.data.opening import Opening
        from meshtune.data.stream import Stream, Streaming
        from meshtune.data.stream_blend import StreamBlend

        cache = cache_folder() / "data"
        streaming = Streaming(_meeting_place(self.run), self.world.local_rank == 0, self.world.is_first)
        found = Opening(
            plan.recipe.rows,
            plan.tokenizer,
            plan.max_seq_length,
            plan.vocabulary,
            cache,
            streaming,
            plan.recipe.seed,
            verify_cache=self.world.local_rank == 0,  # which comes first; the others of the node find what it has seen
        )
        training = found.training()
        if isinstance(training, Stream | StreamBlend):
            self.held.callback(training.close)
        return training, found.validation()

    def _choose_quantised(self) -> Quantised | None:
        source = adapting.held(self.plan.source, self.recipe, compute_dtype(self.precision))
        return quantizing.choose(self.recipe, source, self.adapter, self.layout, self.findings)

    def _choose_precision(self) -> tuple[str, float | None]:
        """What `auto` chose when a run began stays for all of it, wherever it is resumed."""
        stored = self.resume.manifest.get("precision") if self.resume is not None else None
        asked = self.recipe.training.precision
        return precision.choose_compute(stored if stored and asked == "auto" else asked, self.recipe, self.world.device)

    def _open_folder(self) -> tuple[Complete | None, list[str]]:
        """Take the run folder, check that its checkpoint belongs to this recipe and data, then write its facts.

        Returns the checkpoint to continue from and what is to be said of it.
        """
        lock = self.held.enter_context(folder.take(self.run))
        sweep(self.run)
        resume = folder.find_resume(self.recipe, self.run, self.damaged)
        if resume is not None and resume != self.resume:  # another run has ended while this one waited for the folder
            verify(resume)
        changes = [] if resume is None else self._changes(resume)
        changes += folder.clear_the_way(self.run, resume, self.damaged)
        if not lock.supported:
            changes.append(f"WARNING     the file system of {self.run} has no locks: give the folder to no other run")
        data = self.train_data.report.as_dict()
        if self.validation_data:
            reports = {name: found.report.as_dict() for name, found in self.validation_data.items()}
            data = {"train": data, **{f"validation {name}".strip(): report for name, report in reports.items()}}
        layout = {
            **self.layout.describe(),
            "attention": self.attention.description,
            "precision": self.precision,
            **precision.facts(self.recipe, self.world.device),
        }
        folder.write_facts(self.run, self.recipe, layout, data)
        return resume, changes

    def _changes(self, resume: Complete) -> list[str]:
        made_by = folder.continued(folder.resolved_recipe(resume.path.parent.parent), resume)
        changes = [f"changed     {line}" for line in folder.changes(made_by, self.recipe)]
        if resume.manifest.get("data") != self.train_data.fingerprint:
            raise CheckpointError(
                f"{resume.path} was trained on other data (its rows, tokenizer or lengths have changed since); restore them, or "
                "name another checkpoint.dir"
            )
        return changes


def describe(setup: Setup, changes: list[str]) -> list[str]:
    """What a run says of itself before it builds the model."""
    recipe, plan = setup.recipe, setup.plan
    lines = [
        f"run folder  {setup.run}",
        f"layout      {setup.layout.summary()}",
        f"batch       {plan.sizes.summary()}",
        *(f"tensor      {note}" for note in (setup.findings.notes() if setup.findings else [])),
        *(f"adapter     {line}" for line in (setup.adapter.lines() if setup.adapter is not None else [])),
        *(f"weights     {line}" for line in (setup.quantised.lines if setup.quantised is not None else ())),
        f"attention   {setup.attention.description}{_by_auto(recipe.model.attention)}",
        f"precision   {setup.precision} compute{_by_auto(recipe.training.precision)}",
        *(f"data        {line}" for line in (*setup.train_data.report.summary(), *setup.course.order.notes())),
    ]
    for name, data in setup.validation_data.items():
        lines += [f"validation  {name + ': ' if name else ''}{line}" for line in data.report.summary()]
    lines += precision.notes(recipe, setup.precision, setup.world.device)
    lines += rounding.notes(recipe)
    if setup.resume is not None:
        lines.append(f"resuming    from {setup.resume.path}, after step {setup.resume.step}")
    return [*lines, *changes]


def _by_auto(asked: str) -> str:
    return " (chosen by auto)" if asked == "auto" else ""


def _meeting_place(run: Path) -> Path:
    """Where the ranks of this node, which one process has started, share what belongs to this run alone."""
    started_by = os.getppid() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else os.getpid()
    name = f"{run.absolute()} {started_by} {os.environ.get('MASTER_PORT', '')}"
    return cache_folder() / "streams" / hashlib.sha256(name.encode()).hexdigest()[:32]
