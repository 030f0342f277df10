"""Preparation: what becomes of each row, what is counted and named, and a cache that notices every change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtune.config import from_mapping
from meshtune.data import prepare as prepare_module
from meshtune.data.dataset import TokenDataset
from meshtune.data.opening import Opening
from meshtune.data.prepare import prepare, preview
from meshtune.data.section import DataSection
from meshtune.errors import DataError, RecipeError
from tests.unit import data_tokenizers as kit


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(name: str, *rows: Any) -> str:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return written


def ready(tmp_path: Path, path: Any, tokenizer: Any = None, longest: int = 64, **settings: Any) -> TokenDataset:
    section = from_mapping(DataSection, {"train_path": path, **settings})
    return Opening(section, tokenizer or kit.words(), longest, cache_dir=tmp_path / "cache").training()


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


def texts(*lengths: int) -> list[dict[str, str]]:
    """Rows of the given numbers of tokens, the end of sequence included."""
    return [{"text": " ".join(["hi"] * (length - 1))} for length in lengths]


def test_rows_become_documents_in_file_order(tmp_path: Path, write: Any) -> None:
    first = write("a.jsonl", chat("hi", "ok"), chat("ok", "hi"))
    second = write("b.jsonl", chat("hi", "ok", "hi", "ok"))
    dataset = ready(tmp_path, [first, second])
    assert len(dataset) == 3 and dataset.lengths.tolist() == [7, 7, 13]
    assert dataset.supervised_counts.tolist() == [2, 2, 4]
    ids, supervised = dataset[2]
    assert ids.dtype == np.int64 and supervised.dtype == np.bool_
    assert ids.tolist() == [0, 1, 7, 4, 2, 8, 4, 1, 7, 4, 2, 8, 4]
    assert np.flatnonzero(supervised).tolist() == [5, 6, 11, 12]
    report = dataset.report
    assert (report.rows_read, report.rows_used, report.tokens, report.supervised_tokens) == (3, 3, 27, 8)
    with pytest.raises(IndexError):
        dataset[3]


def test_text_rows_get_the_tokenizers_special_tokens_and_one_eos(tmp_path: Path, write: Any) -> None:
    path = write("a.jsonl", {"text": "hi ok"}, {"text": "hi <end>"}, {"text": "<end>"})
    dataset = ready(tmp_path, path)
    assert len(dataset) == 2 and "no supervised token to predict" in dataset.report.unusable
    assert [dataset[i][0].tolist() for i in range(2)] == [[7, 8, 4], [7, 4]]
    assert all(dataset[i][1].all() for i in range(2))
    assert dataset.supervised_counts.tolist() == [2, 1]


def test_unusable_rows_are_counted_and_named_and_the_rest_is_used(tmp_path: Path, write: Any) -> None:
    """A11 and C22a: bad rows by name; a row whose answer begins beyond the maximum length has nothing to
    learn.
    """
    rows = [
        chat("hi", "ok"),
        "{bad",
        {"text": "x"},
        chat("hi"),
        chat("hi " * 60, "ok"),
        chat("hi", "ok\ud800"),
    ]
    path = write("a.jsonl", *rows)
    report = ready(tmp_path, path, longest=16, max_unusable=1.0).report
    assert (report.rows_read, report.rows_used, report.rows_unusable) == (6, 1, 5)
    named = {reason: item.names for reason, item in report.unusable.items()}
    assert named["not valid JSON"][0].startswith(f"{path}:2 (")
    assert named["no column `messages`"] == [f"{path}:3 (found text)"]
    assert named["no message has the role assistant"] == [f"{path}:4 (roles: user)"]
    assert named["no supervised token to predict within max_seq_length"] == [f"{path}:5 (66 tokens)"]
    assert "half a surrogate pair" in "".join(named)
    summary = "\n".join(report.summary())
    assert f"{path}:2" in summary and "1 of 6 rows" in summary
    assert json.loads(json.dumps(report.as_dict()))["unusable"]["not valid JSON"]["count"] == 1


def test_a_folder_is_reported_by_its_files_and_what_is_left_aside(tmp_path: Path, write: Any) -> None:
    (tmp_path / "rows").mkdir()
    names = [write(f"rows/{number}.jsonl", chat("hi", "ok")) for number in range(12)]
    (tmp_path / "rows" / "README.md").write_text("x", encoding="utf-8")
    report = ready(tmp_path, str(tmp_path / "rows")).report
    assert report.sources == sorted(names) and report.rows_read == 12
    assert report.summary()[0].startswith(", ".join(sorted(names)[:8]) + " and 4 more: 12 of 12 rows used")
    assert "README.md" in report.summary()[-1] and len(report.warnings) == 1


def test_many_unusable_rows_name_the_first_and_count_all(tmp_path: Path, write: Any) -> None:
    path = write("a.jsonl", chat("hi", "ok"), *["{"] * 50)
    report = ready(tmp_path, path, max_unusable=1.0).report
    assert report.unusable["not valid JSON"].count == 50 and len(report.unusable["not valid JSON"].names) == 20
    assert "and 30 more" in "\n".join(report.summary())


def test_no_usable_row_is_an_error_with_reasons_and_names(tmp_path: Path, write: Any) -> None:
    path = write("a.jsonl", chat("hi"), chat("ok"), "{")
    with pytest.raises(DataError) as error:
        ready(tmp_path, path)
    assert f"2 rows unusable, no message has the role assistant: {path}:1" in str(error.value)
    with pytest.raises(DataError, match="longer than max_seq_length 4"):
        ready(tmp_path, write("b.jsonl", *texts(9, 9)), longest=4, overlong="drop")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("overlong", "lengths", "left_out"),
    [("truncate", [3, 8, 8], 12), ("drop", [3, 8], 20), ("split", [3, 8, 8, 8, 4], 0)],
)
def test_overlong_rows_as_configured(
    tmp_path: Path, write: Any, overlong: str, lengths: list[int], left_out: int
) -> None:
    """C23: lengths 3, 8, 20 and a maximum of 8; tokens kept and left out add up."""
    dataset = ready(tmp_path, write("a.jsonl", *texts(3, 8, 20)), longest=8, overlong=overlong)
    assert dataset.lengths.tolist() == lengths
    assert all(len(ids) == len(flags) for ids, flags in (dataset[i] for i in range(len(dataset))))
    report = dataset.report
    assert report.tokens + report.tokens_left_out == 31 and report.tokens_left_out == left_out
    counts = report.truncated, report.dropped_overlong, report.split
    assert counts == (overlong == "truncate", overlong == "drop", overlong == "split")


def test_overlong_error_names_the_row_and_its_length(tmp_path: Path, write: Any) -> None:
    path = write("a.jsonl", *texts(3, 8, 20))
    with pytest.raises(DataError, match=rf"{path}:3: has 20 tokens, but max_seq_length is 8"):
        ready(tmp_path, path, longest=8, overlong="error")


def test_split_conversations_keep_their_mask_and_lose_parts_without_a_target(tmp_path: Path, write: Any) -> None:
    path = write("a.jsonl", chat("hi hi hi hi hi hi hi", "ok ok"))
    dataset = ready(tmp_path, path, longest=6, overlong="split")  # 14 tokens; 11, 12, 13 are learnt
    assert dataset.lengths.tolist() == [6, 2] and dataset.supervised_counts.tolist() == [1, 1]
    assert dataset.report.windows_without_target == 1
    assert dataset.report.tokens_left_out == 6


def test_the_cache_is_used_and_notices_every_change(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A5: data, tokenizer, template, special tokens, settings; the same input is not encoded again."""
    path = write("a.jsonl", chat("hi", "ok"), chat("hi hi hi", "ok"))
    made = []
    real = prepare_module.BlockEncoder
    monkeypatch.setattr(prepare_module, "BlockEncoder", lambda *args: made.append(args) or real(*args))

    def again(**changes: Any) -> TokenDataset:
        return ready(tmp_path, path, **{"tokenizer": kit.words(), **changes})

    first = again()
    assert again().fingerprint == first.fingerprint and len(made) == 1
    assert again().report == first.report
    renamed = kit.words()
    renamed.eos_token = "<eos>"
    other_template = kit.words("<bos>{% for m in messages %}<a> {{ m.content }} <end>{% endfor %}")
    more_tokens = kit.words()
    more_tokens.add_tokens(["later"])
    changes: list[dict[str, Any]] = [
        {"tokenizer": other_template},
        {"tokenizer": renamed},
        {"tokenizer": more_tokens},
        {"longest": 8},
        {"overlong": "split"},
        {"train_on": "last"},
        {"reasoning": "keep"},
    ]
    for count, change in enumerate(changes, start=2):
        again(**change)
        assert len(made) == count
    write("a.jsonl", chat("hi", "ok"), chat("hi hi ok", "ok"))
    assert again().fingerprint != first.fingerprint and len(made) == len(changes) + 2


def test_a_damaged_cache_is_named_and_made_again(
    tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("a.jsonl", chat("hi", "ok"), chat("ok", "hi"))
    good = ready(tmp_path, path)
    want = good[1][0].tolist()
    said = {
        "flip": "input_ids.bin: holds other bytes than were written",
        "cut": "input_ids.bin: has 52 bytes, of which 56 were written",
        "no array": "offsets.bin: is missing",
        "no manifest": "",
    }
    for damage, told in said.items():
        ids = good.folder / "input_ids.bin"
        if damage == "flip":
            ids.write_bytes(b"\x09" + ids.read_bytes()[1:])
        elif damage == "cut":
            ids.write_bytes(ids.read_bytes()[:-4])
        else:
            (good.folder / ("manifest.json" if damage == "no manifest" else "offsets.bin")).unlink()
        again = ready(tmp_path, path)
        assert again[1][0].tolist() == want and again[0][0].tolist() == [0, 1, 7, 4, 2, 8, 4]
        heard = capsys.readouterr().err
        assert f"made anew: {good.folder / told}" in heard if told else "made anew" not in heard
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [good.folder.name]


def test_only_one_rank_of_a_node_reads_the_cache_as_a_whole(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others compare sizes; and what has just been written is not read once more."""
    read: list[str] = []
    digest = prepare_module.store._digest
    monkeypatch.setattr(prepare_module.store, "_digest", lambda file, *of: read.append(file.name) or digest(file, *of))
    section = from_mapping(DataSection, {"train_path": write("a.jsonl", chat("hi", "ok"))})

    def opened(verify_cache: bool) -> Any:
        return Opening(section, kit.words(), 16, 60, tmp_path / "cache", verify_cache=verify_cache).training()

    first = opened(True)
    assert len(read) == 3
    assert opened(False).fingerprint == first.fingerprint and len(read) == 3
    assert opened(True).fingerprint == first.fingerprint and len(read) == 6
    ids = first.folder / "input_ids.bin"
    ids.write_bytes(ids.read_bytes()[:-4])
    assert opened(False)[0][0].tolist() == [0, 1, 7, 4, 2, 8, 4], "a file that is cut off is seen by its size"


def test_another_process_may_publish_the_same_data_first(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", chat("hi", "ok"))
    load, calls = prepare_module.store.load, []

    def absent_at_first(folder: Path, **how: Any) -> Any:
        calls.append(folder)
        return None if len(calls) == 1 else load(folder, **how)

    first = ready(tmp_path, path)
    monkeypatch.setattr(prepare_module.store, "load", absent_at_first)
    assert ready(tmp_path, path).fingerprint == first.fingerprint
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [first.folder.name]


def test_the_cache_folder_follows_the_environment(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "elsewhere"))
    section = from_mapping(DataSection, {"train_path": write("a.jsonl", *texts(3))})
    assert prepare(section, section.train_path, kit.words(), 8).folder.parent == tmp_path / "elsewhere" / "data"
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(DataError, match="MESHTUNE_CACHE"):
        prepare(section, section.train_path, kit.words(), 8, cache_dir=blocked / "x")


def test_validation_and_preview(tmp_path: Path, write: Any) -> None:
    """Sets by name, one alone under ""; the report of the first rows writes nothing."""
    path, new = write("a.jsonl", *[chat("hi", "ok")] * 100), write("v.jsonl", chat("hi", "ok"))

    def sets(**data: Any) -> list[tuple[str, int]]:
        section = from_mapping(DataSection, {"train_path": path, **data})
        found = Opening(section, kit.words(), 8, cache_dir=tmp_path / "cache").validation()
        return [(name, len(data)) for name, data in found.items()]

    assert sets(validation_path=new) == [("", 1)]
    assert sets(validation_path={"seen": path, "new": new}) == [("seen", 100), ("new", 1)]
    kept = list((tmp_path / "cache").iterdir())
    report = preview(from_mapping(DataSection, {"train_path": path}), path, kit.words(), 8, rows=10)
    assert (report.rows_read, report.tokens, report.format) == (10, 70, "messages")
    assert sets() == [] and list((tmp_path / "cache").iterdir()) == kept


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_seq_length": 1}, "max_seq_length"),
        ({"train_path": []}, "train_path"),
        ({"train_split": "x"}, "train_split"),
        ({"validation_split": "x"}, "validation_split"),
        ({"validation_path": {}}, "names no set"),
        ({"validation_path": {"chat-1": "a.jsonl"}}, "letters, digits and _"),
        ({"validation_path": {"chat": []}}, "validation_path"),
        ({"hub_config": "x"}, "hub_config"),
    ],
)
def test_settings_without_meaning_or_effect_are_problems(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        from_mapping(DataSection, {"train_path": "a.jsonl", **settings})


def test_hub_settings_are_accepted_with_a_hub_id() -> None:
    from_mapping(DataSection, {"train_path": ["org/name"], "train_split": "train[:10]", "hub_config": "main"})
