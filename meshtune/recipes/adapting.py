"""What a recipe's `peft:` comes to: chosen and checked before any weight is read, put into the meta model, given its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtune.errors import CheckpointError, Problem, RecipeError
from meshtune.models.adapters.section import AdapterSection

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from meshtune.checkpoint.folder import Complete
    from meshtune.layout import Plan
    from meshtune.models.section import ModelSection
    from meshtune.models.source import Source
    from meshtune.models.trainable import Trained
    from meshtune.recipes.arithmetic import Sizes
    from meshtune.recipes.recipe import Recipe
    from meshtune.recipes.run import Setup


@dataclass(frozen=True)
class Chosen:
    """PEFT's config of the adapter, and what a user should know of what it is for."""

    config: LoraConfig
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        config = self.config
        kind = "DoRA" if config.use_dora else "rsLoRA" if config.use_rslora else "LoRA"
        targets = sorted((*_as_list(config.target_modules), *(config.target_parameters or ())))
        shown = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in targets))
        return [f"{kind} of rank {config.r}, alpha {config.lora_alpha}, for {shown}", *self.notes]


def problems(recipe: Recipe) -> Iterable[tuple[str, str]]:
    """(key, message) of what an adapter cannot go with in a recipe."""
    if recipe.peft is None:
        return
    for key in ("trainable", "freeze"):
        if getattr(recipe.model, key, None) is not None:
            yield f"model.{key}", "has no effect beside peft, with which adapters train alone; use peft.modules_to_save"
    section = recipe.peft
    untrained = set(recipe.model.add_tokens or ()).difference(map(str, section.trainable_token_indices or ()))
    if untrained and section.adapter is None and not section.modules_to_save:
        yield (
            "model.add_tokens",
            f"{', '.join(map(repr, sorted(untrained)))} would keep a row of the embedding that nothing has trained; name them in "
            "peft.trainable_token_indices, or the embedding in peft.modules_to_save",
        )
    if recipe.distributed.strategy == "megatron_fsdp":
        yield "distributed.strategy", "megatron_fsdp does not hold frozen weights beside trained ones; fsdp2 and ddp do"


def choose(recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerBase | None = None) -> Chosen | None:
    """What the adapter of `recipe` is for in the model of `source`, found on meta. None without an adapter. Its tokenizer is
    loaded where it is needed and not given.

    Raises RecipeError or ModelError with all that does not fit, before any weight is read.
    """
    if recipe.peft is None:
        return None
    from meshtune.models import hf
    from meshtune.models.adapters import files
    from meshtune.models.adapters.inject import inject, require_peft

    require_peft()
    model = hf.build(source, "eager")
    chosen = _chosen(recipe.peft, source, model, tokenizer)
    adapter = inject(model, recipe.peft, chosen.config)
    if recipe.peft.adapter is not None:
        files.read_whole(model, adapter, files.find(recipe.peft.adapter))
    return chosen


def _chosen(
    section: AdapterSection, source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> Chosen:
    from meshtune.models.adapters import files
    from meshtune.models.adapters.facts import facts_of
    from meshtune.models.adapters.inject import config_of
    from meshtune.models.adapters.targets import find_targets

    if section.adapter is not None:
        config = files.read_config(files.find(section.adapter))
        if section.dropout is not None:
            config.lora_dropout = section.dropout
        return Chosen(config)
    targets = find_targets(section, model, facts_of(source, model))
    tokens = _token_ids(section.trainable_token_indices or [], source, tokenizer, model)
    return Chosen(config_of(section, targets, model, tokens), targets.notes)


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _token_ids(
    asked: list[int | str], source: Source, tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel
) -> list[int]:
    """Ids of tokens that a recipe names by id or by text. Raises RecipeError for what is no token of the model's."""
    from meshtune.models.source import load_tokenizer

    known: dict[str, int] = {}
    if any(isinstance(item, str) for item in asked):
        known = (tokenizer or load_tokenizer(source.section)).get_vocab()
    embedding = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])  # type: ignore[index]
    found: list[int] = []
    wrong: list[str] = []
    for item in asked:
        index = known.get(item) if isinstance(item, str) else item
        if index is None:
            wrong.append(
                f"{item!r} is no token of the tokenizer; add it by model.add_tokens, or name a token by its id"
            )
        elif not 0 <= index < rows:
            wrong.append(f"{item!r} (id {index}) has no row in the embedding, which has {rows}")
        elif index in found:
            wrong.append(f"{item!r} (id {index}) is named twice")
        else:
            found.append(index)
    if wrong:
        raise RecipeError([Problem("peft.trainable_token_indices", message) for message in wrong])
    return found


def held(source: Source, recipe: Recipe, compute_dtype: torch.dtype) -> Source:
    """`source` with what its weights are held in: what an adapter leaves frozen, in the checkpoint's dtype. DDP does not widen
    weights where they are used, FSDP2 does."""
    return source if recipe.peft is None else source.frozen(compute_dtype, recipe.distributed.strategy == "fsdp2")


def base_of(
    recipe: Recipe, source: Source, weights: Mapping[str, torch.Tensor] | None, resume: Complete | None
) -> str | None:
    """The fingerprint of the weights that an adapter stands beside, which its checkpoints do not hold; None without one.

    Raises CheckpointError if they are others than those of the run that is resumed.
    """
    if recipe.peft is None:
        return None
    from meshtune.models import fingerprint

    found = fingerprint.of_files(source) if weights is None else fingerprint.of_tensors(weights)
    if weights is None and source.section.weights == "random":
        found = f"{found}-{recipe.seed}"
    if resume is not None and (before := resume.manifest.get("base")) != found:
        raise CheckpointError(
            f"{resume.path} holds an adapter beside other weights than those of {source.name} (they were {before}, are {found}); "
            "restore them, or name another checkpoint.dir"
        )
    return found


def put(model: PreTrainedModel, recipe: Recipe, chosen: Chosen, plan: Plan) -> Plan:
    """Put the adapter into the bare meta `model`, whose plan is `plan`. Returns the plan of both."""
    from meshtune.models.adapters.inject import inject
    from meshtune.models.adapters.rows import adapted

    assert recipe.peft is not None
    inject(model, recipe.peft, chosen.config)
    return adapted(plan, model)


def trained(model: PreTrainedModel, section: ModelSection) -> Trained | None:
    """What is trained of a whole meta `model`; None if that is all of it."""
    from meshtune.models.adapters.view import adapter_of
    from meshtune.models.trainable import by_patterns, find_trained

    if (adapter := adapter_of(model)) is not None:
        return find_trained(model, adapter.trained.__contains__)
    if section.trainable is None and section.freeze is None:
        return None
    return find_trained(model, by_patterns(model, section.trainable, section.freeze))


def sizes_of(model: PreTrainedModel, bare: Sizes, chosen: Trained) -> Sizes:
    """The sizes of a whole meta `model`, of which `bare` are those without its adapter. A layer may hold its weight in another
    form now, and counts as it did."""
    from meshtune.models.adapters.view import adapter_of
    from meshtune.recipes.arithmetic import Sizes, sizes

    now = sizes(model, chosen)
    if adapter_of(model) is None:
        return now
    added_body, added_head = now.body - now.frozen_body, now.head - now.frozen_head
    return Sizes(bare.body + added_body, bare.head + added_head, bare.body, bare.head)


def fill(setup: Setup, model: PreTrainedModel, plan: Plan) -> None:
    """Give the adapter in a sharded `model`, whose own weights are there, its values. Every rank calls it.

    Of a run that is resumed it has storage, which `take_part` follows when the checkpoint has filled it.
    """
    from meshtune.models.adapters import files
    from meshtune.models.adapters.layers import place_layers
    from meshtune.models.adapters.values import initialize_adapter
    from meshtune.models.adapters.view import adapter_of

    adapter, section = adapter_of(model), setup.recipe.peft
    assert adapter is not None and section is not None
    place_layers(model, plan, setup.layout)
    initialize_adapter(model, setup.recipe.seed if setup.resume is None else None, setup.world.device)
    if setup.resume is None:
        if section.adapter is not None:
            folder = files.find(section.adapter)
            setup.world.all_together(lambda: files.fill(model, adapter, folder))
        take_part(model)


def take_part(model: PreTrainedModel) -> None:
    """Once an adapter has its values: what began as a part of the weights is taken out of them. Every rank calls it, once."""
    from meshtune.models.adapters.view import adapter_of

    if adapter_of(model) is not None:
        from meshtune.models.adapters.decomposition import take_from_weights

        take_from_weights(model)
