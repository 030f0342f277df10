"""`meshtune verify`: layouts that are right are exact, and what is broken on purpose is caught."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshtune.config import from_mapping
from meshtune.errors import LayoutError, ModelError
from meshtune.recipes.recipe import Recipe
from meshtune.verify import beside
from meshtune.verify.course import Outcome, run
from meshtune.verify.engine import verify, verify_config
from meshtune.verify.pool import Pool, RankLostError
from meshtune.verify.report import Report
from tests.parity.conversations import make_conversations, make_tokenizer, write_jsonl
from tests.parity.models import save_model

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
TINY |= {"num_key_value_heads": 2}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    cache = str(tmp_path_factory.mktemp("cache"))
    with patch.dict(os.environ, MESHTUNE_CACHE=cache), Pool() as started:
        yield started


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Conversations through a real template; of the model, only config and tokenizer are there."""
    save_model(tmp_path / "model", "qwen3_moe", make_tokenizer())
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    write_jsonl(tmp_path / "train.jsonl", make_conversations(9, seed=0))
    sections: dict[str, Any] = {"model": {"name": str(tmp_path / "model")}, "training": {"learning_rate": 1e-4}}
    data = {"train_path": str(tmp_path / "train.jsonl"), "packing": True}
    return from_mapping(Recipe, {**sections, "data": data})


def statuses(report: Report) -> dict[str, str]:
    return {verdict.layout: verdict.status for verdict in report.verdicts}


def test_data_parallel_layouts_are_exact_and_what_training_refuses_is_refused(pool: Pool, recipe: Recipe) -> None:
    report = verify(recipe, "fsdp2,hsdp,ddp,ep3xfsdp2", pool=pool)
    assert statuses(report) == {"fsdp2": "exact", "hsdp": "exact", "ddp": "exact", "ep3xfsdp2": "refused"}
    assert report.passed and report.packed and report.experts
    assert "distributed.ep_size: 3 must divide" in report.verdicts[-1].reason
    for verdict in report.verdicts[:-1]:
        assert [len(one.loss) for one in verdict.comparisons] == [3, 3]
        assert all(one.worst_difference < 1e-6 for one in verdict.comparisons)
    assert not list(pool.folder.glob("small*"))


def test_the_gradient_is_clipped_and_the_batch_is_cut_in_two(pool: Pool) -> None:
    courses: list[Outcome] = []

    class Watched(beside.Beside):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            courses.append(self._reference.value)

    with patch("meshtune.verify.engine.Beside", Watched):
        verify_config(pool, "llama", TINY, "ddp")
    assert len(set(courses[0].courses[0].supervised_tokens)) > 1
    assert min(courses[0].courses[0].grad_norm) > 0.1


def without_clipping(*arguments: Any) -> Outcome:
    if dist.get_world_size() == 1:
        return run(*arguments)
    with patch("meshtune.training.step.clip_grad_norm_"):
        return run(*arguments)


def with_a_rank_that_drifts(*arguments: Any) -> Outcome:
    with patch("torch.optim.SGD.step", drift(torch.optim.SGD.step)):
        return run(*arguments)


def drift(step: Any) -> Any:
    def drifting(self: torch.optim.Optimizer, *arguments: Any) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1 + 1e-6 * dist.get_rank()
        return step(self, *arguments)

    return drifting


def with_one_gradient_half(*arguments: Any) -> Outcome:
    from meshtune.recipes import assembly

    def halved(*given: Any, _build: Any = assembly.build_model) -> Any:
        model, parallel = _build(*given)
        if dist.get_world_size() > 1:
            norm = dict(model.named_parameters())["model.model.layers.0.input_layernorm.weight"]
            norm.register_hook(lambda gradient: gradient / 2)
        return model, parallel

    with patch("meshtune.recipes.assembly.build_model", halved):
        return run(*arguments)


def with_a_crash(*arguments: Any) -> Outcome:
    if dist.get_world_size() > 1 and dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    return run(*arguments)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (without_clipping, "sgd: gradient norm of step 2 differs"),
        (with_a_rank_that_drifts, "parameters are no longer equal bit for bit"),
        (with_one_gradient_half, "model.layers.0.input_layernorm.weight"),
        (with_a_crash, "ZeroDivisionError: on purpose"),
    ],
)
def test_what_is_broken_on_purpose_is_caught(pool: Pool, broken: Any, says: str) -> None:
    with patch.object(beside, "_run", broken):
        (verdict,) = verify_config(pool, "llama", TINY, "ddp").verdicts
    assert verdict.status == "failing"
    assert says in verdict.reason


def test_a_model_that_packs_no_rows_is_tried_on_padded_ones(pool: Pool) -> None:
    report = verify_config(pool, "bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}, "ddp")
    assert statuses(report) == {"ddp": "exact"} and not report.packed


def test_a_model_that_one_process_cannot_train_is_an_error(pool: Pool, recipe: Recipe) -> None:
    unknown = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": "nowhere/at/all"})})
    with pytest.raises(ModelError, match="nowhere/at/all"):
        verify(unknown, "fsdp2", pool=pool)


def die_on_rank_1() -> int:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    return 0


def hang_on_rank_1() -> int:
    if dist.get_rank() == 1:
        time.sleep(60)
    return 0


def refuse() -> int:
    if dist.get_rank() == 0:
        raise LayoutError("on purpose")
    return dist.get_rank()


def rank() -> int:
    return dist.get_rank()


def test_ranks_that_die_or_hang_are_replaced(pool: Pool) -> None:
    begun = time.monotonic()
    assert isinstance(pool.run(2, die_on_rank_1)[1].error, RankLostError)
    assert isinstance(pool.run(2, hang_on_rank_1, timeout=3.0)[1].error, RankLostError)
    assert isinstance(pool.run(2, refuse)[0].error, LayoutError)
    assert [answer.value for answer in pool.run(3, rank)] == [0, 1, 2]
    assert time.monotonic() - begun < 60
