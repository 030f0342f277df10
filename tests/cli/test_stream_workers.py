"""Streams that processes encode: the same blocks as one thread makes, ahead of training, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshtune.config import from_mapping
from meshtune.data import stream_encoding, workers
from meshtune.data.opening import Opening
from meshtune.data.section import DataSection
from meshtune.data.stream import Stream, Streaming
from meshtune.data.stream_blend import StreamBlend
from meshtune.data.stream_encoding import processes_for
from meshtune.errors import DataError
from tests.unit import data_tokenizers as kit


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What became of each process that was started; pieces are small."""
    outcomes: list[Any] = []
    real = workers._Process.end
    monkeypatch.setattr(workers._Process, "end", lambda self: (real(self), outcomes.append(self.host.process.poll())))
    monkeypatch.setattr(stream_encoding, "_PIECE_ROWS", 3)
    monkeypatch.setattr(workers, "_WORKS_MEANWHILE", False)
    return outcomes


def written(path: Path, *lengths: int) -> str:
    lines = [json.dumps({"text": " ".join(["hi"] * length)}) if length else "{bad" for length in lengths]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def opened(folder: Path, paths: Any, num_workers: int | None, **settings: Any) -> Any:
    section = {"train_path": paths, "streaming": True, "shuffle_buffer": 8, "num_workers": num_workers, **settings}
    return Opening(
        from_mapping(DataSection, section), kit.words(), 64, 60, folder / "c", Streaming(folder / "s")
    ).training()


def found(stream: Stream, *places: tuple[int, int]) -> list[Any]:
    """What each block holds; "end" past the stream's end."""
    blocks = []
    for place in places:
        block = stream.blocks.get(place)
        documents = block.documents
        kept = None if documents is None else [documents[n][0].tolist() for n in range(len(documents))]
        blocks.append("end" if block.end else kept)
    return blocks


def test_blocks_counts_and_complaints_are_those_of_one_thread(
    tmp_path: Path, ended: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """C27: blocks of one and of several pieces, one without a usable row, over the end, and from a place further on."""
    path = written(tmp_path / "a.jsonl", *range(1, 9), *[0] * 8, *range(17, 30))
    outcomes = []
    for count in (1, 2):
        stream = opened(tmp_path, path, count)
        straight = found(stream, *((0, n) for n in range(5)), *((1, n) for n in range(3)))
        report = stream.report
        jumped = found(stream, (3, 2), (3, 3), (3, 4), (4, 0))
        stream.close()
        outcomes.append((straight, jumped, report.summary(), capsys.readouterr().out))
    assert outcomes[0] == outcomes[1]
    straight, jumped, _, said = outcomes[0]
    assert [len(block) if isinstance(block, list) else block for block in straight] == [
        8,
        None,
        8,
        5,
        "end",
        8,
        None,
        8,
    ]
    assert jumped == [straight[2], straight[3], "end", straight[0]] and "rows 8 and on: 8 rows unusable" in said
    assert len(ended) == 4 and None not in ended, "two processes, and two after the leap"


def test_an_error_of_a_process_names_the_row_and_leaves_nothing(tmp_path: Path, ended: list[Any]) -> None:
    path = written(tmp_path / "a.jsonl", *[2] * 20, 70)
    stream = opened(tmp_path, path, 2, overlong="error")
    with pytest.raises(DataError, match=r"a\.jsonl:21: has 71 tokens, but max_seq_length is 64"):
        found(stream, (0, 1), (0, 2))
    stream.close()
    assert len(ended) == 2 and None not in ended and not (tmp_path / "s").exists()


def test_a_stream_of_one_block_starts_no_process(tmp_path: Path, ended: list[Any]) -> None:
    stream = opened(tmp_path, written(tmp_path / "a.jsonl", 1, 2), 2)
    assert stream.first is not None
    stream.close()
    assert ended == []


def test_training_keeps_the_cores_where_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, count in ((1, 0), (4, 0), (7, 0), (8, 2), (16, 4), (128, 8)):
        monkeypatch.setattr(stream_encoding, "default_workers", lambda cores=cores: cores)
        assert processes_for(None) == count
    assert [processes_for(asked) for asked in (1, 2, 9)] == [0, 2, 9]


def test_several_streams_share_the_processes_by_weight(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{n}.jsonl", 1, 2) for n in range(3)]
    sources = [{"path": path, "weight": weight} for path, weight in zip(paths, (6, 3, 0.5), strict=True)]
    for asked, counts in ((6, [4, 2, 1]), (1, [0, 0, 0])):
        blend = opened(tmp_path, sources, asked)
        assert isinstance(blend, StreamBlend)
        assert [stream.blocks._encoder._processes for stream in blend.streams] == counts  # type: ignore[attr-defined]
        blend.close()
