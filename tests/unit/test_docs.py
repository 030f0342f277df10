"""What the project's pages name is there, the generated page is up to date, and every example loads."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from meshtune.config import load
from meshtune.config.annotations import sections
from meshtune.recipes.recipe import Recipe
from tests.documents import PLAYED, RECORDS, ROOT, WRITTEN, anchors, blocks, code_spans, links

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
FOLDERS = ("meshtune", "tests", "docs", "examples", "benchmarks")
KEYS = {path: set(cls.model_fields) for path, cls in sections(Recipe)}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_reference_is_up_to_date() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == generator().render(), "run: python docs/generate.py"


@pytest.mark.parametrize("document", WRITTEN, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    for number, target in links(document):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), f"{document.name}:{number} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{document.name}:{number} links to the heading {target}"


@pytest.mark.parametrize("document", WRITTEN, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_files_and_keys_that_are_named_exist(document: Path) -> None:
    for number, span in code_spans(document):
        where = f"{document.name}:{number} names {span}"
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", span):
            assert (ROOT / span).exists(), where
        section, _, key = span.partition(".")
        if (section,) in KEYS and re.fullmatch(r"[a-z_]+", key):
            assert key in KEYS[(section,)], where
        if re.fullmatch(r"meshtune(\.[a-z_]+)+(\.[A-Z]\w+)?", span):
            assert importable(span), where


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True


@pytest.mark.parametrize("document", WRITTEN, ids=lambda d: d.relative_to(ROOT).as_posix())
def test_make_targets_that_are_named_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("document", [*PLAYED, *RECORDS], ids=lambda d: d.relative_to(ROOT).as_posix())
def test_blocks_are_well_formed_and_few_are_not_run(document: Path) -> None:
    left_out = [block for block in blocks(document) if "not run" in block.notes]
    assert all(block.notes["not run"] for block in left_out), "say why a block is not run"
    assert document in RECORDS or len(left_out) <= 2
    for block in blocks(document):
        if block.language == "python":
            ast.parse(block.text, block.place)


@pytest.mark.parametrize("record", RECORDS, ids=lambda d: d.name)
def test_a_decision_says_what_why_and_what_was_measured(record: Path) -> None:
    lines = record.read_text(encoding="utf-8").splitlines()
    assert re.match(r"# \d{4} ", lines[0]) and record.name.startswith(lines[0][2:6])
    assert "## Measured" in lines


def test_the_contributors_page_stays_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_every_example_loads(example: Path) -> None:
    recipe = load(Recipe, example)
    assert recipe.checkpoint.dir == f"runs/{example.stem}", "an example's run folder is named after it"


def test_the_example_for_this_machine_names_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load(Recipe, "examples/pretrain-tiny.yaml")
    assert Path(recipe.model.name, "config.json").is_file()
    assert Path(str(recipe.data.train_path)).is_file()


def test_the_starter_loads_and_names_every_key_of_its_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshtune.cli import app

    monkeypatch.chdir(tmp_path)
    app(["init", "starter"], standalone_mode=False)
    recipe = load(Recipe, "starter.yaml")
    assert recipe.checkpoint.dir == "runs/starter"
    text = Path("starter.yaml").read_text(encoding="utf-8")
    further = re.search(r"^# Further sections, .*: (.*)\.$", text, re.MULTILINE)
    assert further is not None
    named = further[1].split(", ")
    assert named == ["peft", "quantization", "training.fp8"]
    shown = {path: keys - set(named) for path, keys in KEYS.items() if ".".join(path) not in named}
    missing = [key for keys in shown.values() for key in keys if not re.search(rf"^\s*(# )?{key}:", text, re.MULTILINE)]
    assert missing == ["fp8"]
