"""What can be known of a run before any weight is read: `meshtune check` prints it, training starts from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshtune.config import recipe_hash
from meshtune.errors import Problem, RecipeError
from meshtune.layout import Layout
from meshtune.optim.methods import check_installed
from meshtune.recipes import memory, optimizing, precision
from meshtune.recipes.recipe import Recipe
from meshtune.training.section import BatchSizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from meshtune.data.opening import Tokens
    from meshtune.data.order import Order
    from meshtune.models.source import Source

_DEFAULT_SEQUENCE = 2048


@dataclass(frozen=True)
class Plan:
    """A recipe resolved against a world size, its model's config and its tokenizer."""

    recipe: Recipe
    layout: Layout
    sizes: BatchSizes
    source: Source
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int

    @property
    def longest_row(self) -> int:
        """The most tokens that a row of a micro-batch may have."""
        packs = self.sizes.per_device_batch_size if self.recipe.data.packing else 1
        return packs * self.max_seq_length

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has an embedding for."""
        return vocabulary_of(self.source)

    @property
    def context(self) -> tuple[int, str] | None:
        """Over how many ranks sequences are cut, and how attention reaches across; None if they are whole."""
        size = self.layout.size("cp")
        return (size, self.layout.cp_method) if size > 1 else None

    @property
    def pad_token_id(self) -> int:
        """Fills padding, which is known by length and never by this id."""
        return next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)


def plan(recipe: Recipe, world_size: int, device_type: str = "cpu") -> Plan:
    """Resolve `recipe`. Raises a MeshtuneError naming what does not fit; no weight is read."""
    from meshtune.models.source import load_tokenizer, resolve

    layout = Layout.resolve(recipe.distributed, world_size, device_type)
    sizes = recipe.training.batch_sizes(layout.size("batch"), recipe.distributed.pp_microbatches or layout.size("pp"))
    _check_strategy(layout)
    precision.check(recipe, device_type)
    memory.check(recipe, layout, device_type, sizes.accumulation)
    _check_pipeline(recipe, layout, sizes)
    check_installed(recipe.optimizer.name)
    source = resolve(recipe.model, recipe.quantization)
    layout.check(source.facts())
    optimizing.check_patterns(recipe, source)
    length = resolved_length(recipe, source)
    tokenizer = load_tokenizer(recipe.model)
    _check_rows(recipe, source, tokenizer)
    return Plan(with_folder(recipe), layout, sizes, source, tokenizer, length)


def _check_rows(recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises RecipeError where the embedding has no rows for the tokens that the recipe adds."""
    ids = {token: tokenizer.get_vocab()[token] for token in recipe.model.add_tokens or ()}
    rows = vocabulary_of(source)
    if without := [token for token, index in ids.items() if index >= rows]:
        message = (
            f"the embedding has {rows:,} rows, none of them for {', '.join(map(repr, without))}; make it larger first "
            f"(model.resize_token_embeddings({max(ids.values()) + 1}) in transformers, then save_pretrained), and name that "
            "folder in model.name"
        )
        raise RecipeError([Problem("model.add_tokens", message)])


def _check_strategy(layout: Layout) -> None:
    """Raises RecipeError where the strategy cannot run on this machine."""
    if layout.strategy == "megatron_fsdp":
        from meshtune.parallel.megatron import problems

        if misfits := [Problem(key, message) for key, message in problems(layout)]:
            raise RecipeError(misfits)


def _check_pipeline(recipe: Recipe, layout: Layout, sizes: BatchSizes) -> None:
    """Raises RecipeError naming what a pipeline cannot do with so many micro-batches."""
    if layout.size("pp") == 1:
        return
    from meshtune.parallel.pipeline import problems

    asked = recipe.distributed
    found = problems(
        layout.size("pp"),
        asked.pp_schedule or "1f1b",
        asked.pp_microbatches,
        sizes.accumulation,
        recipe.training.compile,
    )
    if misfits := [Problem(key, message) for key, message in found]:
        raise RecipeError(misfits)


def vocabulary_of(source: Source) -> int:
    """How many token ids a model has an embedding for."""
    return int(source.config.get_text_config(decoder=True).vocab_size)


def resolved_length(recipe: Recipe, source: Source) -> int:
    """The longest row in tokens: as asked, else what the model's positions allow. Raises RecipeError for more than those."""
    positions = source.max_positions
    wanted = recipe.data.max_seq_length
    if wanted is None:
        return min(positions or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE)
    if positions is not None and wanted > positions:
        raise RecipeError(
            f"data.max_seq_length: {wanted} is longer than the {positions} positions of {recipe.model.name}; "
            f"write {positions} or less"
        )
    return wanted


def with_folder(recipe: Recipe) -> Recipe:
    """The recipe with its run folder named."""
    return recipe if recipe.checkpoint.dir is not None else in_folder(recipe, default_folder(recipe))


def default_folder(recipe: Recipe) -> str:
    """A run folder's name, derived from the recipe, so that two recipes never share one by default."""
    model = recipe.model.name.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
    return f"runs/{model}-{recipe.recipe}-{recipe_hash(recipe)[:8]}"


def in_folder(recipe: Recipe, folder: str) -> Recipe:
    """The same recipe in another run folder."""
    return recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"dir": folder})})


@dataclass(frozen=True)
class Course:
    """The rows in the order in which training meets them, how many optimizer steps that takes, and the factor of the
    learning rate at each."""

    order: Order
    total_steps: int
    factor: Callable[[int], float]


def course(plan: Plan, data: Tokens) -> Course:
    """Raises DataError or RecipeError where data, batch size, length of the run and schedule do not fit together."""
    from meshtune.data.order import GlobalOrder
    from meshtune.data.stream import Stream
    from meshtune.data.stream_blend import StreamBlend, StreamBlendOrder
    from meshtune.data.stream_order import StreamOrder
    from meshtune.data.units import UnitOptions

    recipe, section, size = plan.recipe, plan.recipe.data, plan.sizes.global_batch_size
    asked = UnitOptions(section.shuffle, recipe.seed, section.packing, plan.max_seq_length, section.packing_options)
    if isinstance(data, Stream | StreamBlend):
        if isinstance(data, Stream):
            stream: Order = StreamOrder(data, size, asked, drop_last=section.drop_last)
        else:
            stream = StreamBlendOrder(data, size, asked)
        total_steps = recipe.training.total_steps(0)  # where it ends is not known: max_steps is set
        return Course(stream, total_steps, recipe.lr_scheduler.build(total_steps))
    order = GlobalOrder(
        data,
        size,
        shuffle=asked.shuffle,
        seed=asked.seed,
        packing=asked.packing,
        max_seq_length=asked.max_seq_length,
        drop_last=section.drop_last,
        options=asked.packing_options,
    )
    total_steps = recipe.training.total_steps(order.batches_per_epoch)
    return Course(order, total_steps, recipe.lr_scheduler.build(total_steps))
