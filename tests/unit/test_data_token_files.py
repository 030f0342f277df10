"""Token files: every form of them, sequences with exact borders, and 10^9 tokens opened without being read."""

from __future__ import annotations

import os
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtune.data.batch import IGNORED_LABEL
from meshtune.data.collate import collate_packed, collate_padded
from meshtune.data.order import GlobalOrder
from meshtune.data.token_corpus import TokenCorpus, open_corpus
from meshtune.data.units import UnitOptions
from meshtune.data.windows import WindowUnits
from meshtune.errors import DataError
from tests.unit.data_ranks import global_batches, loaders
from tests.unit.token_file_writers import write_index, write_llmc, write_megatron, write_raw

EOS = 0


def opened(tmp_path: Path, *paths: str, longest: int = 8, **settings: Any) -> TokenCorpus:
    arguments = {"vocabulary": 60_000, "separator": EOS, "token_dtype": None, **settings}
    return open_corpus(paths, max_seq_length=longest, cache=tmp_path / "cache", **arguments)


def documents_of(corpus: TokenCorpus) -> list[list[int]]:
    return [corpus.read(d, 0, int(n)).tolist() for d, n in enumerate(corpus.lengths)]


def distinct(lengths: Sequence[int], first: int = 1) -> list[list[int]]:
    """Documents of which no two tokens are equal."""
    ends = np.cumsum([first, *lengths])
    return [list(range(start, start + length)) for start, length in zip(ends, lengths, strict=False)]


# ---- forms


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_megatron_files_of_every_integer_type(tmp_path: Path, dtype: str) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 100, 7]]
    corpus = opened(tmp_path, write_megatron(tmp_path / "a.bin", documents, dtype))
    assert documents_of(corpus) == documents and corpus.lengths.dtype == np.int64
    assert f"{dtype}, Megatron index" in corpus.report.summary()[0]


def test_a_document_of_several_sequences_is_one(tmp_path: Path) -> None:
    """Sentence splitting writes a sequence for each sentence; the index says which are a document, and which is empty."""
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3], [], [4, 5]], firsts=[0, 2, 3, 4])
    assert documents_of(opened(tmp_path, path)) == [[1, 2, 3], [4, 5]]


def test_an_index_that_does_not_say_where_documents_begin(tmp_path: Path) -> None:
    """Some writers leave the list short. Megatron reads sequences then, and so does this, and says so."""
    corpus = opened(tmp_path, write_megatron(tmp_path / "a.bin", [[1, 2], [3, 4]], firsts=[0]))
    assert documents_of(corpus) == [[1, 2], [3, 4]]
    assert "each is taken as one" in corpus.report.summary()[-1]


def test_raw_files_end_a_document_at_each_separator(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2, EOS, 3, EOS, EOS, 4, 5])
    assert documents_of(opened(tmp_path, path)) == [[1, 2, EOS], [3, EOS], [EOS], [4, 5]]
    assert documents_of(opened(tmp_path, path, separator=3)) == [[1, 2, EOS, 3], [EOS, EOS, 4, 5]]
    assert documents_of(opened(tmp_path, path, separator=None)) == [[1, 2, EOS, 3, EOS, EOS, 4, 5]]


def test_borders_are_found_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A5: the same length, other tokens."""
    path = write_raw(tmp_path / "a.bin", [1, EOS, 2, 3])
    first = opened(tmp_path, path)
    kept = list((tmp_path / "cache" / "borders").iterdir())
    assert len(kept) == 1 and opened(tmp_path, path).fingerprint == first.fingerprint
    write_raw(tmp_path / "a.bin", [1, 2, EOS, 3])
    changed = opened(tmp_path, path)
    assert documents_of(changed) == [[1, 2, EOS], [3]] and changed.fingerprint != first.fingerprint
    kept[0].write_bytes(b"broken")
    write_raw(tmp_path / "a.bin", [1, EOS, 2, 3])
    assert documents_of(opened(tmp_path, path)) == [[1, EOS], [2, 3]]
    monkeypatch.setattr("meshtune.data.borders._CHUNK", 3)
    assert documents_of(opened(tmp_path / "other", path)) == [[1, EOS], [2, 3]]


def test_headers_of_llm_c(tmp_path: Path) -> None:
    short = write_llmc(tmp_path / "a.bin", [1, 50_000, EOS, 2, 3])
    long = write_llmc(tmp_path / "b.bin", [1, 70_000, EOS, 2], magic=20240801, version=7)
    assert documents_of(opened(tmp_path, short)) == [[1, 50_000, EOS], [2, 3]]
    assert documents_of(opened(tmp_path, long, vocabulary=128_256)) == [[1, 70_000, EOS], [2]]


def test_the_type_of_raw_ids_follows_the_vocabulary_or_the_setting(tmp_path: Path) -> None:
    ids = [1, 2, EOS, 5]
    assert documents_of(opened(tmp_path, write_raw(tmp_path / "a.bin", ids), vocabulary=65_536))[0] == [1, 2, EOS]
    wide = write_raw(tmp_path / "b.bin", ids, "uint32")
    assert documents_of(opened(tmp_path, wide, vocabulary=65_537))[0] == [1, 2, EOS]
    assert documents_of(opened(tmp_path, wide, vocabulary=100, token_dtype="uint32"))[0] == [1, 2, EOS]
    with pytest.raises(DataError, match=r"b\.bin: read as uint16.*every second token is 0.*token_dtype: uint32"):
        opened(tmp_path, wide, vocabulary=100)


def test_folders_patterns_and_prefixes_name_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, documents in (("b", [[3, 4]]), ("a", [[1, 2]])):
        write_megatron(tmp_path / f"{name}.bin", documents)
    for path in (str(tmp_path), f"{tmp_path}/?.bin"):
        assert documents_of(opened(tmp_path, path)) == [[1, 2], [3, 4]]
    assert documents_of(opened(tmp_path, f"{tmp_path}/b", f"{tmp_path}/a")) == [[3, 4], [1, 2]]
    with pytest.raises(DataError, match=r"none\*\.bin: no such file"):
        opened(tmp_path, f"{tmp_path}/none*.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, bin_: idx.write_bytes(b"TNTIDX\x00\x00" + bytes(60)), "not one that Megatron writes"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:20]), "not one that Megatron writes"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:-30]), "counts 2 sequences, .* bytes, but has"),
        (lambda idx, bin_: patch(idx, 9, struct.pack("<Q", 2)), "is of version 2; 1 can be read"),
        (lambda idx, bin_: patch(idx, 17, b"\x07"), "its values are float32; token ids are integers"),
        (lambda idx, bin_: patch(idx, 17, b"\x63"), r"of an unknown kind \(99\)"),
        (lambda idx, bin_: patch(idx, 34, struct.pack("<i", -1)), "sequence 0 of its index .* has -1 tokens"),
        (
            lambda idx, bin_: bin_.write_bytes(bin_.read_bytes()[:-2]),
            "needs 8 bytes .*but the file has 6: it is truncated",
        ),
    ],
)
def test_a_damaged_index_is_an_error_that_names_it(tmp_path: Path, damage: Any, message: str) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3, 4]])
    damage(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(DataError, match=rf"a\.bin.*{message}"):
        opened(tmp_path, path)


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


def test_other_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").write_bytes(b"")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (str(tmp_path / "odd.bin"), {}, "3 bytes are no whole number of uint16 tokens"),
        (str(tmp_path / "empty.bin"), {}, "the file is empty"),
        (
            write_llmc(tmp_path / "a.bin", [1] * 9, count=10),
            {},
            "counts 10 tokens, 1,044 bytes, but the file has 1,042",
        ),
        (write_llmc(tmp_path / "b.bin", [1] * 9, version=3), {}, "of version 3; 1 can be read"),
        (
            write_llmc(tmp_path / "c.bin", [1] * 9),
            {"token_dtype": "uint32"},
            "says uint16, but data.token_dtype is uint32",
        ),
        (write_megatron(tmp_path / "d.bin", [[1, 2]]), {"token_dtype": "int32"}, "its index says uint16"),
        (write_raw(tmp_path / "e.bin", [1]), {}, "no document has two tokens"),
    ]
    for path, settings, message in cases:
        with pytest.raises(DataError, match=rf"{Path(path).name}.*{message}"):
            opened(tmp_path, path, **settings)


def test_ids_outside_the_vocabulary_are_named_with_their_place(tmp_path: Path) -> None:
    """Before training where a sample shows them, and while reading at the latest."""
    path = write_raw(tmp_path / "a.bin", [1, 2, 3, 99, 4])
    with pytest.raises(DataError, match=r"a\.bin: token 3 is 99, but the model's vocabulary is 0 to 98"):
        opened(tmp_path, path, vocabulary=99)
    negative = write_megatron(tmp_path / "b.bin", [[1, 2, -5]], "int32")
    with pytest.raises(DataError, match=r"b\.bin: token 2 is -5"):
        opened(tmp_path, negative)
    many = np.full(3_000_000, 7)
    many[40_000] = 50
    late = opened(tmp_path, write_raw(tmp_path / "c.bin", many), longest=1000, vocabulary=50)
    units = late.units(UnitOptions(False, 0, True, 1000))
    assert len(units.documents([0, 38])) == 1
    with pytest.raises(DataError, match=r"c\.bin: token 40,000 is 50"):
        units.documents([0, 39])


# ---- sequences


def targets(units: WindowUnits, epoch: int, packing: bool) -> list[list[tuple[int, int]]]:
    """(token, its target) of each unit of an epoch, in order, as a batch holds them."""
    found = []
    for unit in units.between(epoch, 0, len(units)):
        documents = units.documents(unit)
        batch = collate_packed(documents) if packing else collate_padded(documents, pad_token_id=0)
        pairs = zip(batch.input_ids[0].tolist(), batch.shift_labels[0].tolist(), strict=True)
        found.append([(token, label) for token, label in pairs])
        assert all(label != IGNORED_LABEL for _, label in found[-1])
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_token_is_predicted_once_from_the_one_before_it(tmp_path: Path, packing: bool, shuffle: bool) -> None:
    """Over random documents: none across a border, none twice, none left out but each document's first; all sequences full."""
    rng = random.Random(1)
    for case in range(12):
        lengths = [rng.choice([1, 2, 3, 8, 9, 17, 40]) for _ in range(rng.randint(2, 30))] + [5]
        documents = distinct(lengths)
        cut = rng.randint(1, len(documents) - 1)
        paths = [
            write_megatron(tmp_path / f"{case}a.bin", documents[:cut]),
            write_megatron(tmp_path / f"{case}b.bin", documents[cut:], "int32"),
        ]
        units = opened(tmp_path, *paths).units(UnitOptions(shuffle, case, packing, 8))
        want = Counter(pair for d in documents for pair in pairwise(d))
        for epoch in (0, 1, 5):
            sequences = targets(units, epoch, packing)
            assert Counter(pair for pairs in sequences for pair in pairs) == want
            assert len(sequences) == len(units)
            if packing:
                assert sorted(map(len, sequences))[1:] == [8] * (len(units) - 1)
        if not shuffle and packing:
            assert [p for pairs in targets(units, 3, packing) for p in pairs] == list(want)


def test_documents_of_a_sequence_are_kept_apart(tmp_path: Path) -> None:
    units = opened(tmp_path, write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])).units(
        UnitOptions(False, 0, True, 4)
    )
    batch = collate_packed(units.documents([0, 0]))
    assert batch.input_ids.tolist() == [[1, 2, 4, 6]] and batch.shift_labels.tolist() == [[2, 3, 5, 7]]
    assert batch["document_lengths"].tolist() == [2, 1, 1] and batch.position_ids.tolist() == [[0, 1, 0, 0]]
    assert collate_packed(units.documents([0, 1])).shift_labels.tolist() == [[8, 9]]


def test_a_stream_without_borders_is_cut_into_rows_that_touch(tmp_path: Path) -> None:
    """The way of nanoGPT: inputs x[i : i+T], targets x[i+1 : i+T+1]; rows of one length make no padding."""
    corpus = opened(tmp_path, write_raw(tmp_path / "a.bin", range(1, 10)), longest=4, separator=None)
    units = corpus.units(UnitOptions(False, 0, False, 4))
    batch = collate_padded([d for u in units.between(0, 0, 2) for d in units.documents(u)], pad_token_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch.shift_labels.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]] and batch.attention_mask is None
    assert len(units) == 2 and (batch.tokens, batch.supervised_tokens) == (8, 8)


@pytest.mark.parametrize("packing", [True, False])
def test_no_world_size_changes_a_global_batch_and_a_cursor_goes_on_exactly(tmp_path: Path, packing: bool) -> None:
    """Promise 1, C27 and C67: union over ranks, another order each epoch, the same for a seed; resumed at every place."""
    lengths = [2 + 7 * i % 23 for i in range(14)]
    corpus = opened(tmp_path, write_megatron(tmp_path / "a.bin", distinct(lengths)))

    def course(world_size: int, steps: int, cursor: Any = None, seed: int = 3) -> tuple[list[list[int]], Any]:
        order = GlobalOrder(corpus, 4, seed=seed, packing=packing, max_seq_length=8)
        seen, cursor = global_batches(loaders(order, world_size), steps, cursor)
        labels = [[batch.shift_labels for batch in batches if batch.tokens] for batches in seen]
        return [sorted(int(i) for label in of_batch for i in label[label > 0]) for of_batch in labels], cursor

    steps = 2 * GlobalOrder(corpus, 4, packing=packing, max_seq_length=8).batches_per_epoch + 1
    straight, _ = course(1, steps)
    assert straight == course(3, steps)[0] != course(1, steps, seed=4)[0]
    assert straight[: steps // 2] != straight[steps // 2 : -1]
    for stop in range(1, steps):
        before, cursor = course(2, stop)
        after, _ = course(1, steps - stop, cursor)
        assert before + after == straight


# ---- scale


def test_a_thousand_million_tokens_open_at_once(tmp_path: Path) -> None:
    """10^9 tokens in 10^6 documents: opened, ordered and read from in two seconds of this process, in little memory."""
    resource = pytest.importorskip("resource")
    path, count, documents = tmp_path / "big.bin", 10**9, 10**6
    with path.open("wb") as file:
        file.truncate(2 * count)
    if path.stat().st_blocks * 512 > 10**9:
        pytest.skip("this file system has no sparse files")
    lengths = np.random.default_rng(0).integers(500, 1500, documents)
    lengths[-1] += count - lengths.sum()
    write_index(tmp_path / "big.idx", "uint16", lengths)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    corpus = opened(tmp_path, str(path), longest=2048)
    order = GlobalOrder(corpus, 512, packing=True, max_seq_length=2048, seed=1)
    first = order.documents(order.window(0, 0)[0])
    taken = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if os.uname().sysname == "Darwin" else 1024
    )
    assert sum(len(window.input_ids) for window in first) == 2048
    assert order.units == -(-(count - documents) // 2048)
    assert corpus.report.tokens == count and taken < 2.0 and grown < 400e6


def test_a_raw_file_is_looked_through_in_parts(tmp_path: Path) -> None:
    """Its pages are not held: 4·10^7 tokens are 80 MB."""
    path = tmp_path / "raw.bin"
    with path.open("wb") as file:
        file.truncate(80_000_000)
    corpus = opened(tmp_path, str(path), separator=7)
    assert len(corpus) == 1 and corpus.lengths.tolist() == [40_000_000]
