"""Streams in proportion to weights: shares, order, cursor, ranks, what is reported and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.data.encode_block import BlockEncoder
from meshtune.data.loader import Loader
from meshtune.data.opening import Opening
from meshtune.data.order import GlobalOrder
from meshtune.data.section import DataSection
from meshtune.data.stream import Streaming
from meshtune.data.stream_blend import StreamBlend, StreamBlendOrder
from meshtune.data.units import UnitOptions
from meshtune.errors import DataError, RecipeError
from meshtune.recipes.recipe import Recipe
from tests.unit import data_tokenizers as kit
from tests.unit.data_ranks import global_batches
from tests.unit.test_data_stream import _lengths


@pytest.fixture
def sources(tmp_path: Path) -> Any:
    """Rows whose lengths tell their source, each source with a column of its own."""

    def written(*weights: float, sizes: tuple[int, ...] = (23, 40)) -> list[dict[str, Any]]:
        found = []
        for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
            path, column = tmp_path / f"{number}.jsonl", f"body{number}"
            lines = [json.dumps({column: " ".join(["hi"] * (100 * number + row + 1))}) for row in range(size)]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            found.append({"path": str(path), "weight": weight, "columns": {"text": column}})
        return found

    return written


class Run:
    """The ranks of one node over one blend of streams; the first makes the blocks."""

    def __init__(self, folder: Path, sources: Any, world_size: int = 1, batch: int = 6, **settings: Any) -> None:
        seed = settings.pop("seed", 3)
        section = from_mapping(DataSection, {"train_path": sources, "streaming": True, "shuffle_buffer": 5, **settings})
        self.folder, self.blends, self.loaders = folder, [], []
        for rank in range(world_size):
            shared = Streaming(folder / "s", rank == 0, rank == 0)
            blend = Opening(section, kit.words(), 256, 60, folder / "cache", shared).training()
            assert isinstance(blend, StreamBlend)
            order = StreamBlendOrder(blend, batch, UnitOptions(section.shuffle, seed, section.packing, 256))
            self.blends.append(blend)
            self.loaders.append(
                Loader(order, rank=rank, world_size=world_size, per_device_batch_size=1, pad_token_id=0)
            )

    def lengths(self, batches: int, cursor: Any = None) -> list[list[int]]:
        found, _ = global_batches(self.loaders, batches, cursor)
        return [[n - 1 for batch in one if batch.tokens for n in _lengths(batch)] for one in found]

    @property
    def cursor(self) -> Any:
        return json.loads(json.dumps(self.loaders[0].state_dict()))

    def close(self) -> None:
        for blend in self.blends:
            blend.close()


def run(folder: Path, sources: Any, batches: int, cursor: Any = None, **settings: Any) -> tuple[list[list[int]], Any]:
    one = Run(folder, sources, **settings)
    try:
        return one.lengths(batches, cursor), one.cursor
    finally:
        one.close()


def test_any_stretch_holds_the_shares_and_every_batch_is_full(tmp_path: Path, sources: Any) -> None:
    """3 : 1, whatever the sizes are, over many ends of the smaller source."""
    found, cursor = run(tmp_path, sources(3, 1), 40)
    assert all(len(batch) == 6 for batch in found)
    is_long = [length > 100 for batch in found for length in batch]
    for start in range(0, 240, 7):
        for stop in range(start, 241, 11):
            assert abs(sum(is_long[start:stop]) - (stop - start) / 4) <= 1.5
    assert cursor["units"] == 240 and cursor["taken"] == [180, 60]
    assert [place["epoch"] for place in cursor["sources"]] == [7, 1] and cursor["epoch"] == 1


def test_each_stream_gives_every_row_once_before_any_a_second_time(tmp_path: Path, sources: Any) -> None:
    found, _ = run(tmp_path, sources(1, 1), 30)
    flat = [length for batch in found for length in batch]
    short, long = [n for n in flat if n < 100], [n for n in flat if n > 100]
    assert sorted(short[:23]) == sorted(short[23:46]) == list(range(1, 24)) and short[:23] != short[23:46]
    assert sorted(long[:40]) == list(range(101, 141)) and long[:40] != sorted(long[:40])


def test_in_file_order_it_is_the_blend_of_prepared_rows(tmp_path: Path, sources: Any) -> None:
    """The same meaning of a weight: 2 : 1 of 30 and 30 rows, where the quotas of an epoch are whole numbers."""
    both = sources(2, 1, sizes=(30, 30))
    streamed, _ = run(tmp_path, both, 10, shuffle=False)
    section = from_mapping(DataSection, {"train_path": both, "shuffle": False})
    prepared = Opening(section, kit.words(), 256, 60, tmp_path / "cache").training()
    loader = Loader(
        GlobalOrder(prepared, 6, shuffle=False), rank=0, world_size=1, per_device_batch_size=1, pad_token_id=0
    )
    assert streamed == [[n - 1 for batch in loader.next() for n in _lengths(batch)] for _ in range(10)]


@pytest.mark.parametrize("packing", [False, True])
def test_a_cursor_goes_on_exactly_on_any_number_of_ranks(tmp_path: Path, sources: Any, packing: bool) -> None:
    """C67 and promises 1 and 6: from every place, over the ends of both streams, twice."""
    both = sources(5, 2, sizes=(13, 9))
    straight, _ = run(tmp_path, both, 10, packing=packing)
    assert run(tmp_path, both, 10, packing=packing)[0] == straight
    assert run(tmp_path, both, 10, packing=packing, world_size=3)[0] == straight
    assert run(tmp_path, both, 10, packing=packing, seed=4)[0] != straight
    for stop in range(1, 9):
        before, cursor = run(tmp_path, both, stop, packing=packing, world_size=2)
        middle, cursor = run(tmp_path, both, 1, cursor, packing=packing)
        after, _ = run(tmp_path, both, 9 - stop, cursor, packing=packing)
        assert before + middle + after == straight


def test_a_pack_is_of_one_stream(tmp_path: Path, sources: Any) -> None:
    one = Run(tmp_path, sources(1, 1), packing=True)
    for _ in range(5):
        for batch in one.loaders[0].next():
            assert batch.document_lengths is not None
            assert len({length > 100 for length in batch.document_lengths.tolist()}) == 1
    one.close()


def test_a_stream_that_ends_many_times_in_one_batch(tmp_path: Path, sources: Any) -> None:
    """Its blocks are kept while the batch is read."""
    found, cursor = run(tmp_path, sources(30, 1, sizes=(2, 9)), 2, batch=40, world_size=2)
    assert Counter(n for batch in found for n in batch if n < 100) == {1: 39, 2: 38}
    assert cursor["sources"][0]["epoch"] == 38


def test_blocks_before_the_cursor_are_not_encoded_again(
    tmp_path: Path, sources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = sources(1, 1, sizes=(40, 40))
    _, cursor = run(tmp_path, both, 9, shuffle=False)
    encoded = []
    original = BlockEncoder.encode
    monkeypatch.setattr(
        BlockEncoder, "encode", lambda self, block: encoded.append(block.written[0].name) or original(self, block)
    )
    run(tmp_path, both, 1, cursor, shuffle=False)
    assert {name.rpartition(":")[2] for name in encoded} - {"31"} == {"26"}


def test_units_notes_and_counts_name_their_stream(tmp_path: Path, sources: Any) -> None:
    both = sources(3, 1)
    one = Run(tmp_path, both, shuffle=False, batch=2)
    one.loaders[0].next()
    a, b = (source["path"] for source in both)
    assert one.loaders[0].taken == [
        [f"{a}: document 0 of block 0 of epoch 0"],
        [f"{a}: document 1 of block 0 of epoch 0"],
    ]
    order = one.loaders[0]._order
    assert order.notes()[:2] == [f"{a}: 75.00% of the units", f"{b}: 25.00% of the units"]
    one.loaders[0].next()
    report = one.blends[0].report
    assert report.sources == [a, b] and report.rows_read >= 10 and len(report.as_dict()["parts"]) == 2
    assert any(line.startswith("weight 75.00%: streamed, 5 rows at a time") for line in report.summary())
    one.close()
    assert not list(tmp_path.glob("s-*")) and not (tmp_path / "s").exists()


def test_other_weights_or_files_are_other_data(tmp_path: Path, sources: Any) -> None:
    def fingerprint(*weights: float, **settings: Any) -> str:
        one = Run(tmp_path, sources(*weights, **settings))
        one.close()
        return one.blends[0].fingerprint

    assert fingerprint(1, 1) == fingerprint(2, 2) != fingerprint(1, 2)
    assert fingerprint(1, 1, sizes=(23, 39)) != fingerprint(1, 1)


def test_a_source_without_a_row_is_named_and_nothing_is_left_behind(tmp_path: Path, sources: Any) -> None:
    both = sources(1, 1)
    Path(both[1]["path"]).write_text('{"body1": ""}\n' * 3, encoding="utf-8")
    with pytest.raises(DataError, match=r"1\.jsonl: no row can be used to train on:\n  3 rows unusable"):
        Run(tmp_path, both, max_unusable=1.0)
    assert not list(tmp_path.glob("s-*"))


def test_a_cursor_of_another_blend_is_refused(tmp_path: Path, sources: Any) -> None:
    one = Run(tmp_path, sources(1, 1))
    place = {"epoch": 0, "units": 3, "block": 0}
    for cursor in (
        {"epoch": 0, "units": 3, "taken": [3], "sources": [place]},
        {"epoch": 0, "units": 4, "taken": [2, 1], "sources": [place, place]},
        {"epoch": 0, "units": 3, "taken": [2, 1], "sources": [place, {**place, "block": -1}]},
        {"epoch": 0, "units": 3, "block": 0},
    ):
        with pytest.raises(DataError, match="the saved data cursor is unit"):
            one.loaders[0].load_state_dict(cursor)  # type: ignore[arg-type]
    one.close()


def test_settings_that_make_no_sense_are_refused_and_the_others_are_not(sources: Any) -> None:
    def recipe(paths: Any, **data: Any) -> Any:
        sections = {"model": {"name": "x"}, "training": {"learning_rate": 0.1, "max_steps": 3}}
        return from_mapping(Recipe, {**sections, "data": {"train_path": paths, "streaming": True, **data}})

    both = sources(1, 2)
    assert recipe(both, shuffle_buffer=9).data.streaming
    bare = [{key: value for key, value in source.items() if key != "weight"} for source in both]
    with pytest.raises(RecipeError, match=r"data\.streaming: takes plain paths, or sources that have a weight each"):
        recipe(bare)
    with pytest.raises(RecipeError, match=r"data\.drop_last: has no effect on a stream of several sources"):
        recipe(both, drop_last=True)
