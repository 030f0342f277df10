"""What an optimizer step communicates (the table of docs/numerics.md, "Communication"), and what no rank may hold in it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from meshtune.layout.pieces import named_pieces
from meshtune.layout.section import DistributedSection
from meshtune.models.blocks import unit_names
from meshtune.models.placing import local_of
from meshtune.recipes.run import Setup
from meshtune.verify.layouts import Trial, parse
from tests.communication import Communication, Counts, Shapes, save_model, save_rows, steps
from tests.ranks import ROOT, Ranks

TOKENS, MICRO_BATCHES = 16, 2
LAYOUTS = ("fsdp2", "hsdp", "ddp", "tp2", "tp2+sp", "cp2", "pp2", "fsdp2xtp2")
DENSE: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# Three of four experts: some of them are on each of two ranks, so every token travels to both.
MOE = {**DENSE, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
MODELS = {"llama": DENSE, "qwen3_moe": MOE}
CASES = [("llama", name) for name in LAYOUTS] + [("qwen3_moe", name) for name in (*LAYOUTS, "ep2")]


def formulas() -> list[dict[str, str]]:
    """The rows of the table, by the names of its columns; formulas without their backticks."""
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    section = text.split("## Communication\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    header, *rows = [
        [cell.strip(" `") for cell in line.split(" | ")] for line in lines if "`" in line or "where" in line
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


def symbols(setup: Setup, values: dict[str, Any]) -> dict[str, int]:
    """What stands for what in the table, for this rank."""
    layout, model = setup.layout, setup.model.model
    inside = tuple(f"{name}." for name in unit_names(model))
    pieces = named_pieces(model)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    own = {name: local_of(p).numel() for name, p in model.named_parameters()}
    experts = {name for name in sizes if layout.ep > 1 and name in pieces and pieces[name].axis == "ep"}
    blocks = {name for name in sizes if name.startswith(inside)} - experts
    whole = {name for name in blocks if name not in pieces}
    shared = whole if layout.sequence_parallel else {name for name in whole if "layernorm" not in name}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, {"": layout.rank("pp"), **sizes})
    others = [held for held in names if held[""] != layout.rank("pp")]
    copies = {name for name in sizes if any(name in held for held in others)}
    return {
        **{axis: layout.size(axis) for axis in ("fsdp", "tp", "ep")},
        "L": values["num_hidden_layers"],
        "m": MICRO_BATCHES,
        "T": TOKENS,
        "S": TOKENS - 1,
        "H": values["hidden_size"],
        "K": values["num_key_value_heads"] * values["head_dim"],
        "k": values.get("num_experts_per_tok", 0),
        "B": sum(sizes[name] for name in blocks),
        "O": sum(size for name, size in sizes.items() if name not in blocks | experts),
        "X": sum(own[name] for name in shared) + len(shared) if layout.size("tp") > 1 else 0,
        "Y": sum(own[name] for name in copies) + len(copies) if layout.size("pp") > 1 else 0,
    }


def applies(where: str, setup: Setup, known: dict[str, int]) -> bool:
    layout = setup.layout
    kinds = {
        "any": True,
        "fsdp2": layout.strategy == "fsdp2" and layout.size("pp") == 1,
        "hsdp": layout.strategy == "fsdp2" and layout.size("dp_replicate") > 1,
        "ddp": layout.strategy == "ddp",
        "tp": layout.size("tp") > 1,
        "tp without sp": layout.size("tp") > 1 and not layout.sequence_parallel,
        "tp with sp": layout.sequence_parallel,
        "tp, X > 0": known["X"] > 0,
        "cp": layout.size("cp") > 1,
        "pp": layout.size("pp") > 1,
        "pp, Y > 0": known["Y"] > 0,
        "ep": layout.ep > 1,
    }
    return kinds[where]


def expected(setup: Setup, known: dict[str, int]) -> Counts:
    counts: Counts = {}
    for row in formulas():
        if not applies(row["where"], setup, known):
            continue
        name = row["over"]
        ranks = next(tuple(sorted(g)) for g in setup.layout.groups(name) if dist.get_rank() in g)
        if len(ranks) > 1:
            times, size = (int(eval(row[column], {"min": min, **known})) for column in ("times", "bytes"))
            before = counts.get((row["collective"], ranks), (0, 0))
            counts[row["collective"], ranks] = before[0] + times, before[1] + size
    return counts


def count(recipe: dict[str, Any], rows: Path, values: dict[str, Any]) -> tuple[Counts, Counts]:
    """What the third step communicates on this rank (the first ones learn what the model reaches), and what it should."""
    with steps(recipe, rows) as (setup, advance):
        wanted = expected(setup, symbols(setup, values))
        advance(), advance()
        with Communication() as found:
            advance()
    return found.counts, wanted


def shapes(recipe: dict[str, Any], rows: Path) -> set[tuple[int, ...]]:
    with steps(recipe, rows) as (_, advance), Shapes() as made:
        advance(), advance()
    return made.found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("models")
    for architecture, values in MODELS.items():
        save_model(made / architecture, architecture, values)
    save_rows(made / "rows", 32, TOKENS)
    with patch.dict(os.environ, MESHTUNE_CACHE=str(made / "cache")):
        yield made


def recipe_of(folder: Path, architecture: str, trial: Trial) -> dict[str, Any]:
    """One document a micro-batch, all of the same length."""
    return {
        "model": {"name": str(folder / architecture)},
        "data": {"train_path": "rows", "packing": True, "max_seq_length": TOKENS},
        "distributed": trial.section.model_dump(exclude_defaults=True),
        "training": {
            "max_steps": 4,
            "global_batch_size": MICRO_BATCHES * trial.readers,
            "per_device_batch_size": 1,
            "learning_rate": 1e-3,
            "precision": "fp32",
        },
        "checkpoint": {"dir": str(folder / f"run-{architecture}-{trial.name}"), "resume": "never"},
        "logging": {"progress": "none"},
    }


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_a_step_communicates_what_the_table_says(ranks: Ranks, folder: Path, architecture: str, layout: str) -> None:
    trial = parse(layout, DistributedSection())
    recipe = recipe_of(folder, architecture, trial)
    found, wanted = ranks.call(trial.ranks, count, recipe, folder / "rows", MODELS[architecture])[0]
    assert found == wanted


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp", "fsdp2xtp2", "pp2", "ep2"])
def test_no_rank_makes_a_whole_tensor_of_what_it_has_a_part_of(ranks: Ranks, folder: Path, layout: str) -> None:
    """Parameters, their gradients, logits: the whole vocabulary, or all experts, would show in a shape."""
    trial = parse(layout, DistributedSection())
    recipe = recipe_of(folder, "qwen3_moe", trial)
    for rank, made in enumerate(ranks.call(trial.ranks, shapes, recipe, folder / "rows")):
        if trial.section.tp_size > 1:
            assert {shape for shape in made if MOE["vocab_size"] in shape} == set()
            assert any(MOE["vocab_size"] // 2 in shape for shape in made)
        if trial.section.ep_size > 1:
            assert {shape for shape in made if len(shape) == 3 and shape[0] == MOE["num_experts"]} == set()
        if trial.section.pp_size > 1 and rank == 0:
            wide = {shape for shape in made if MOE["vocab_size"] in shape}
            assert wide == {(MOE["vocab_size"], MOE["hidden_size"])}, "the embedding, and no logits"
