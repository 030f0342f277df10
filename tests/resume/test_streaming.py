"""Training on a stream, from the recipe on: one course on any ranks, also when it is broken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.conversations import make_conversations, write_jsonl
from tests.resume.conftest import Bench
from tests.resume.runs import lines, losses


def recipe_of(bench: Bench, **data: Any) -> dict[str, Any]:
    settings = {"streaming": True, "shuffle_buffer": 7, "packing": True, **data}
    return bench.recipe(bench.model("qwen3"), data=settings, training={"max_steps": 7})


def folder_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["checkpoint"]["dir"])


def test_a_streamed_run_goes_on_on_other_ranks(bench: Bench) -> None:
    """23 rows in blocks of 7, over the stream's end; what is said of the rows at the start and at the end."""
    straight, broken = recipe_of(bench), recipe_of(bench)
    outcome = bench.train(straight)
    assert outcome.error is None and outcome.said.count("streamed, 7 rows at a time") == 2
    assert bench.train(broken, 2, stop_after=3).stopped_after == 3
    again = bench.train(broken, 2)
    assert again.error is None and "resuming" in again.said
    found, wanted = losses(folder_of(broken)), losses(folder_of(straight))
    assert found.keys() == wanted.keys() and found == pytest.approx(wanted, rel=1e-5)
    assert [row["tokens"] for row in lines(folder_of(broken)) if "loss" in row] == [
        row["tokens"] for row in lines(folder_of(straight)) if "loss" in row
    ]
    assert not list((Path(bench.cache) / "streams").iterdir())


def test_a_run_over_weighted_streams_goes_on_on_other_ranks(bench: Bench, tmp_path: Path) -> None:
    """Two files of other sizes, 2 : 1, over the ends of both; each with a note and a sum of its own."""
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", make_conversations(9 + 5 * n, seed=n)) for n in range(2)]
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths, (2, 1), strict=True)]
    straight, broken = (recipe_of(bench, train_path=sources) for _ in range(2))
    outcome = bench.train(straight)
    assert outcome.error is None and outcome.said.count("weight 66.67%: streamed, 7 rows at a time") == 2
    assert f"{paths[1]}: 33.33% of the units" in outcome.said
    assert bench.train(broken, 2, stop_after=3).stopped_after == 3
    assert bench.train(broken, 2).error is None
    found, wanted = losses(folder_of(broken)), losses(folder_of(straight))
    assert found.keys() == wanted.keys() and found == pytest.approx(wanted, rel=1e-5)
    assert not list((Path(bench.cache) / "streams").iterdir())
    sources[0]["weight"] = 3
    assert "was trained on other data" in str(
        bench.train({**broken, "data": {**broken["data"], "train_path": sources}}, 2).error
    )


def test_in_file_order_a_stream_is_what_prepared_rows_are(bench: Bench) -> None:
    plain = {"packing": False, "shuffle": False}
    streamed = recipe_of(bench, **plain)
    prepared = bench.recipe(bench.model("qwen3"), data=plain, training={"max_steps": 7})
    assert bench.train(streamed).error is None and bench.train(prepared).error is None
    assert losses(folder_of(streamed)) == pytest.approx(losses(folder_of(prepared)), rel=1e-6)


def test_another_file_is_refused_on_resuming(bench: Bench, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", make_conversations(20, seed=5))
    recipe = recipe_of(bench, train_path=str(data))
    assert bench.train(recipe, stop_after=2).stopped_after == 2
    write_jsonl(data, make_conversations(20, seed=6))
    assert "was trained on other data" in str(bench.train(recipe).error)
