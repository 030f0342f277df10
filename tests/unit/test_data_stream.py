"""Rows that are prepared while training goes on: order, cursor, the ranks of a node, what is counted, and what is refused."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.data import stream as stream_module
from meshtune.data.encode_block import BlockEncoder
from meshtune.data.loader import Loader
from meshtune.data.opening import Opening
from meshtune.data.section import DataSection
from meshtune.data.stream import Stream, Streaming
from meshtune.data.stream_order import StreamOrder
from meshtune.data.units import UnitOptions
from meshtune.errors import DataError, RecipeError
from meshtune.recipes.recipe import Recipe
from tests.unit import data_tokenizers as kit
from tests.unit.data_ranks import global_batches

Texts = list[str]


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    """Writes rows of so many words each; 0: no row at all, -1: an empty one."""

    def written(*lengths: int, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        lines = [json.dumps({"text": " ".join(["hi"] * length)}) if length else "{bad" for length in lengths]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return written


class Run:
    """A stream and loaders over it, as the ranks of one node have them; the first makes the blocks."""

    def __init__(self, folder: Path, path: Any, world_size: int = 1, batch: int = 4, **settings: Any) -> None:
        seed, drop_last = settings.pop("seed", 3), settings.pop("drop_last", False)
        data = {"train_path": path, "streaming": True, "shuffle_buffer": 5, **settings}
        self.section = from_mapping(DataSection, data)
        places = [Streaming(folder, rank == 0, rank == 0) for rank in range(world_size)]
        self.streams = [Stream(self.section, [path], kit.words(), 64, place) for place in places]
        asked = UnitOptions(self.section.shuffle, seed, self.section.packing, 64)
        self.loaders = [
            Loader(
                StreamOrder(stream, batch, asked, drop_last=drop_last),
                rank=rank,
                world_size=world_size,
                per_device_batch_size=1,
                pad_token_id=0,
            )
            for rank, stream in enumerate(self.streams)
        ]

    def lengths(self, batches: int, cursor: Any = None) -> list[list[int]]:
        """The lengths of the documents of each global batch, in order."""
        found, _ = global_batches(self.loaders, batches, cursor)
        return [[n for batch in one if batch.tokens for n in _lengths(batch)] for one in found]

    @property
    def cursor(self) -> Any:
        return self.loaders[0].state_dict()

    def close(self) -> None:
        for one in self.streams:
            one.close()


def _lengths(batch: Any) -> list[int]:
    return [batch.tokens] if batch.document_lengths is None else batch.document_lengths.tolist()


def run(folder: Path, path: Any, batches: int, cursor: Any = None, **settings: Any) -> tuple[list[list[int]], Any]:
    one = Run(folder, path, **settings)
    try:
        return one.lengths(batches, cursor), one.cursor
    finally:
        one.close()


@pytest.mark.parametrize("packing", [False, True])
def test_every_row_comes_once_in_an_epoch_shuffled_inside_its_block(tmp_path: Path, rows: Any, packing: bool) -> None:
    """C27: 13 rows in blocks of 5; another order in the next epoch, the same for a seed, another for another seed."""
    path = rows(*range(1, 14))
    settings = {"packing": packing, "batch": 1}
    units, _ = run(tmp_path / "s", path, 60, **settings)
    flat = [n for unit in units for n in unit]
    first, second = flat[:13], flat[13:26]
    for epoch in (first, second):
        assert [sorted(epoch[a:b]) for a, b in ((0, 5), (5, 10), (10, 13))] == [
            [2, 3, 4, 5, 6],
            [7, 8, 9, 10, 11],
            [12, 13, 14],
        ]
    assert packing or (first != second and first != sorted(first))
    assert run(tmp_path / "s", path, 60, **settings)[0] == units
    assert run(tmp_path / "s", path, 60, seed=4, **settings)[0] != units


def test_without_shuffling_rows_come_as_they_stand(tmp_path: Path, rows: Any) -> None:
    """A batch reaches from one block into the next, and is short at the stream's end alone, or left out there."""
    path = rows(*range(1, 12))
    found, cursor = run(tmp_path / "s", path, 4, shuffle=False)
    assert found == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12], [2, 3, 4, 5]] and cursor["epoch"] == 1
    one = Run(tmp_path / "s", path, shuffle=False)
    one.lengths(2)
    assert one.loaders[0].taken[:2] == [["document 4 of block 0 of epoch 0"], ["document 0 of block 1 of epoch 0"]]
    one.close()
    dropped, _ = run(tmp_path / "s", path, 4, shuffle=False, drop_last=True)
    assert dropped == [[2, 3, 4, 5], [6, 7, 8, 9], [2, 3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("packing", [False, True])
def test_a_cursor_goes_on_exactly_on_any_number_of_ranks(tmp_path: Path, rows: Any, packing: bool) -> None:
    """C67 and promise 6: from every place, over the stream's end, twice."""
    path = rows(*[1 + 7 * i % 11 for i in range(17)])
    straight, _ = run(tmp_path / "s", path, 8, packing=packing)
    assert run(tmp_path / "s", path, 8, packing=packing, world_size=3)[0] == straight
    for stop in range(1, 7):
        before, cursor = run(tmp_path / "s", path, stop, packing=packing, world_size=2)
        middle, cursor = run(tmp_path / "s", path, 1, json.loads(json.dumps(cursor)), packing=packing)
        after, _ = run(tmp_path / "s", path, 7 - stop, cursor, packing=packing)
        assert before + middle + after == straight


def test_blocks_that_are_passed_over_are_not_encoded(
    tmp_path: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on far into a stream costs reading, not tokenising; the first block tells how long rows are."""
    encoded: list[str] = []
    original = BlockEncoder._block
    monkeypatch.setattr(
        BlockEncoder,
        "_block",
        lambda self, by, block: encoded.append(block.written[0].name) or original(self, by, block),
    )
    one = Run(tmp_path / "s", rows(*range(1, 61)))
    assert one.streams[0].first is not None
    one.lengths(1, {"epoch": 0, "units": 0, "block": 9})
    one.close()
    assert [name.rpartition(":")[2] for name in encoded][:2] == ["1", "46"]
    assert encoded[2:] in ([], [encoded[1].replace(":46", ":51")]), "the next one may have been begun"


def test_blocks_are_made_ahead_and_removed_when_all_ranks_have_passed_them(tmp_path: Path, rows: Any) -> None:
    folder = tmp_path / "s"
    one = Run(folder, rows(*[3] * 200), world_size=2, batch=5)
    one.lengths(1)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("stream")]
    assert threads, "the next block is made in a thread of its own"
    one.lengths(25)
    kept = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert 2 <= len(kept) <= 14
    one.close()
    assert not folder.exists()


def test_unusable_rows_are_said_as_they_come_and_counted(
    tmp_path: Path, rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A11; the block that has no usable row at all is passed over."""
    path = rows(1, 2, 3, 0, 5, 0, 0, 0, 0, 0, 11, 12)
    found, _ = run(tmp_path / "s", path, 2, max_unusable=0.9, shuffle=False, batch=3)
    assert found == [[2, 3, 4], [6, 12, 13]]
    said = capsys.readouterr().out
    assert "data        rows 0 and on: 1 rows unusable, not valid JSON" in said and "rows.jsonl:4" in said
    assert "rows 5 and on: 5 rows unusable" in said
    with pytest.raises(DataError, match=r"6 of 10 rows cannot be used, more than data\.max_unusable"):
        run(tmp_path / "s", path, 2, shuffle=False, batch=3)


def test_a_stream_without_a_usable_row_or_a_full_batch_is_an_error(tmp_path: Path, rows: Any) -> None:
    """C24: never without end, never zero steps."""
    with pytest.raises(DataError, match=r"no row can be used to train on:\n  3 rows unusable, `text` is empty"):
        assert Run(tmp_path / "unusable", rows(-1, -1, -1), max_unusable=1.0).streams[0].first
    with pytest.raises(DataError, match="an epoch of the stream has 3 units, which make no full global batch of 4"):
        run(tmp_path / "s", rows(1, 2, 3), 1, drop_last=True)
    assert run(tmp_path / "s", rows(1, 2, 3), 2, shuffle=False)[0] == [[2, 3, 4]] * 2


def test_what_stops_one_rank_stops_those_that_wait_for_it(tmp_path: Path, rows: Any) -> None:
    one = Run(tmp_path / "s", rows(*[2] * 5, *[70] * 5), world_size=2, overlong="error", batch=5)
    one.lengths(1)
    for loader in one.loaders:
        with pytest.raises(DataError, match=r"rows\.jsonl:6: has 71 tokens, but max_seq_length is 64"):
            loader.next()


def test_files_that_have_changed_are_known(tmp_path: Path, rows: Any) -> None:
    def fingerprint(path: str, **settings: Any) -> str:
        one = Run(tmp_path / "s", path, **settings)
        one.close()
        return one.streams[0].fingerprint

    path = rows(1, 2, 3)
    first = fingerprint(path)
    assert fingerprint(path) == first != fingerprint(path, shuffle_buffer=2)
    assert fingerprint(rows(1, 2, 4)) != first


def test_a_hub_id_streams_anew_in_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, config: Any, split: str, streaming: bool) -> Any:
        asked.append((name, split, streaming))
        return datasets.IterableDataset.from_generator(lambda: ({"text": "hi " * n, "x": None} for n in range(1, 7)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found, _ = run(tmp_path / "s", "org/name", 3, shuffle=False)
    assert found == [[2, 3, 4, 5], [6, 7], [2, 3, 4, 5]]
    assert set(asked) == {("org/name", "train", True)}


def test_a_look_at_a_streamed_hub_id_does_not_fetch_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meshtune check` and the question which format it has: no call without `streaming`, a few rows of an endless set."""
    datasets = pytest.importorskip("datasets")
    message = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]

    def load_dataset(name: str, config: Any, split: str, streaming: bool = False) -> Any:
        assert streaming, "the whole data set would be fetched"
        return datasets.IterableDataset.from_generator(lambda: ({"messages": message} for _ in itertools.count()))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    section = from_mapping(DataSection, {"train_path": "org/name", "streaming": True, "train_on": "last"})
    assert "64 of 64 rows used as `messages`" in Opening(section, kit.words(), 16).preview()[0]


def test_settings_that_make_no_sense_on_a_stream_are_refused(tmp_path: Path, rows: Any) -> None:
    path = rows(1, 2)

    def refused(data: dict[str, Any], **training: Any) -> str:
        sections = {"model": {"name": "x"}, "data": {"train_path": path, "streaming": True, **data}}
        with pytest.raises(RecipeError) as error:
            from_mapping(Recipe, {**sections, "training": {"learning_rate": 0.1, **training}})
        return str(error.value)

    assert "training.max_steps: is needed for a stream" in refused({})
    assert "training.epochs: cannot be counted on a stream" in refused({}, max_steps=3, epochs=1.0)
    assert "data.shuffle_buffer: has no effect" in refused({"streaming": False, "shuffle_buffer": 9})
    assert "data.packing_window: has no effect on a stream" in refused(
        {"packing": True, "packing_window": 9}, max_steps=3
    )
    assert "data.streaming: takes plain paths" in refused({"train_path": [{"path": path}]}, max_steps=3)
    assert "data.streaming: is for rows" in refused({"train_path": "a.bin"}, max_steps=3)
    opening = Opening(from_mapping(DataSection, {"train_path": path, "streaming": True}), kit.words(), 64, 60)
    with pytest.raises(DataError, match="there is nothing to prepare before"):
        opening.training()
    assert opening.preview()


def test_the_default_block_is_said(tmp_path: Path, rows: Any) -> None:
    one = Run(tmp_path / "s", rows(1, 2, 3), shuffle_buffer=None)
    assert one.streams[0].rows_at_once == stream_module.DEFAULT_BUFFER
    assert one.streams[0].first is not None and "streamed, 4,096 rows at a time" in one.streams[0].report.summary()[0]
    one.close()
