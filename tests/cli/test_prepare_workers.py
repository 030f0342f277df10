"""Preparation by several processes: the same documents, counts and complaints as by one, whatever the source."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshtune.config import from_mapping
from meshtune.data import blocks, workers
from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening
from meshtune.data.section import DataSection
from meshtune.data.sources import open_sources
from meshtune.errors import DataError
from tests.unit import data_tokenizers as kit

USER = "hello there"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(blocks, "_BLOCK_ROWS", 20)
    monkeypatch.setattr(workers, "_WORKS_MEANWHILE", False)


def chats(count: int, bad: bool = True) -> list[Any]:
    rows: list[Any] = []
    for number in range(count):
        answer = "" if bad and number % 17 == 5 else "yes " * (number % 7) + str(number)
        messages = [{"role": "user", "content": USER}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages[:1] if bad and number % 13 == 7 else messages * (1 + number % 2)})
    return rows


def written(path: Path, rows: list[Any]) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(b"\xef\xbb\xbf" + content + b"{broken\n\n")
    return str(path)


def ready(path: Any, num_workers: int | None, cache: Path, **settings: Any) -> TokenDataset:
    section = from_mapping(DataSection, {"train_path": path, "num_workers": num_workers, **settings})
    return Opening(section, kit.byte_level("chatml"), 64, cache_dir=cache).training()


def test_the_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C27 for preparation: order, tokens, counts, names and warnings."""
    rows = chats(150)
    paths = [written(tmp_path / name, rows) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]
    found = [ready(paths, count, tmp_path / f"cache{count}", overlong="split") for count in (1, 2)]
    assert len(found[0]) > 200 and found[0].report.rows_unusable > 10
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].report == found[1].report
    monkeypatch.setattr(workers, "_WORKS_MEANWHILE", True)
    assert ready(paths, 2, tmp_path / "meanwhile", overlong="split").fingerprint == found[0].fingerprint
    assert found[0].report.rows_read == 451  # the broken line is one
    assert any(name.startswith(f"{paths[0]}:151 ") for name in found[0].report.unusable["not valid JSON"].names)


def test_blocks_are_the_rows_of_their_source(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        (source,) = open_sources(written(tmp_path / name, chats(100)))
        found = list(blocks.blocks_of(source))
        assert len(found) > 3
        assert [row for block in found for row in block.rows()] == list(source.rows())


@pytest.mark.parametrize("forks", [True, False])
def test_errors_of_workers_are_those_of_one_process_and_leave_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    monkeypatch.setattr(workers, "_FORKS", forks and workers._FORKS)
    ended = []
    real = workers._Process.end
    monkeypatch.setattr(workers._Process, "end", lambda self: (real(self), ended.append(self.host.process.poll())))
    longest = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x " * 200}]
    path = written(tmp_path / "a.jsonl", [*chats(130, bad=False), *[{"messages": longest}] * 2])
    told = []
    for count in (1, 2):
        with pytest.raises(DataError) as error:
            ready(path, count, tmp_path / "cache", overlong="error")
        told.append(str(error.value))
    assert told[0] == told[1] and f"{path}:131: has" in told[0]
    assert len(ended) == 2 and None not in ended
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("forks", [True, False])
def test_a_worker_that_is_ended_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool) -> None:
    monkeypatch.setattr(workers, "_FORKS", forks and workers._FORKS)
    function = tmp_path / "mine.py"
    function.write_text(
        "import os, signal\ndef rows(row):\n    print('said')\n"
        "    if '149' in row['messages'][-1]['content']: os.kill(os.getpid(), signal.SIGKILL)\n    return row\n",
        encoding="utf-8",
    )
    path = written(tmp_path / "a.jsonl", chats(150, bad=False))
    with pytest.raises(DataError, match=r"ended by SIGKILL.*num_workers: 1"):
        ready(path, 2, tmp_path / "cache", row_function=f"{function}:rows")


def test_workers_begin_when_there_is_work_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshtune.data import prepare

    started: list[int] = []

    def here(encoder: Any, blocks: Any, count: int) -> Any:
        started.append(count)
        return (encoder.encode(block) for block in blocks)

    monkeypatch.setattr(prepare, "encode_in_order", here)
    monkeypatch.setattr(prepare, "default_workers", lambda: 2)
    path = written(tmp_path / "a.jsonl", chats(100))
    alone = ready(path, None, tmp_path / "alone")
    assert started == []
    monkeypatch.setattr(prepare, "_ALONE_S", 0.0)
    assert ready(path, None, tmp_path / "many").fingerprint == alone.fingerprint and started == [2]


def test_workers_share_the_cores_of_this_process() -> None:
    assert 1 <= workers.default_workers() <= (os.cpu_count() or 1)
