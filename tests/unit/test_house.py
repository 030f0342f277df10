"""Rules of the house that no linter knows: where a kind of line lives, and what must not be written at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "meshtune").rglob("*.py"))
EVERYTHING = [*PACKAGE, *sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]

MESHES_ARE_MADE_BY = {"init_device_mesh", "new_group", "new_subgroups"}
# Of `DeviceMesh`, torch 2.13.
PRIVATE_MESH_CALLS = {"_flatten", "_unflatten", "_concatenate", "_from_backend", "_get_all_submeshes", "_get_root_mesh"}
CUDA_ONLY = {"apex", "bitsandbytes", "deepspeed", "flash_attn", "flash_attn_interface", "liger_kernel", "pynvml"}
CUDA_ONLY |= {"transformer_engine", "triton", "vllm", "xformers"}
POSIX_ONLY = {"fcntl", "grp", "pwd", "resource", "termios"}
# Model types whose name is an ordinary word of code, the kind of a layer, or a library.
SPEAKERS = {("conversions.py", "gpt")}  # who speaks in rows of ShareGPT
ORDINARY_WORDS = {
    "aria",
    "big",
    "data",
    "dots",
    "flex",
    "git",
    "got",
    "mamba",
    "megatron",
    "openai",
    "opt",
    "recurrent",
    "seed",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LONGEST_FILE = 300


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 0)}"


def room(file: Path) -> str:
    return file.relative_to(ROOT / "meshtune").parts[0]


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Every call, and the last name of what is called: `init` of `a.b.init(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node, node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def imported(node: ast.AST) -> list[str]:
    """The top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) and not node.level else []


def at_import_time(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: bodies of functions and of TYPE_CHECKING are left out."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of all nodes that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            found.add(id(first.value))
    return found


def families() -> set[str]:
    """The leading words of the model types for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    words = {match[0] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if (match := re.match("[a-z]{3,}", name))}
    return words - ORDINARY_WORDS


def names_and_texts(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Identifiers and texts, without docstrings and without hub ids, which are values of a user."""
    described = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            if not HUB_ID.fullmatch(node.value):
                yield node, node.value
        elif isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef | ast.ClassDef | ast.arg | ast.alias):
            yield node, next(str(getattr(node, key)) for key in ("id", "attr", "name", "arg") if hasattr(node, key))


def test_meshes_and_process_groups_are_made_in_layout_alone() -> None:
    guarded = MESHES_ARE_MADE_BY | PRIVATE_MESH_CALLS
    found = [place(file, call) for file in PACKAGE for call, name in calls(tree_of(file)) if name in guarded]
    outside = [where for where in found if not where.startswith("meshtune/layout/")]
    assert found, "the rule looks for names that nobody calls: has torch renamed them?"
    assert not outside, f"ask the layout for the mesh or the group instead: {outside}"


def test_no_model_family_is_named_outside_its_own_file() -> None:
    known = families()
    assert {"llama", "qwen", "gemma", "mixtral"} <= known
    named = [
        f"{place(file, node)} names {word}"
        for file in PACKAGE
        if "families" not in file.parts
        for node, text in names_and_texts(tree_of(file))
        for word in re.findall("[a-z]+", text.lower())
        if word in known and (file.name, word) not in SPEAKERS
    ]
    assert not named, f"quirks of an architecture live in meshtune/models/families/<model_type>.py: {named}"


@pytest.mark.parametrize(("packages", "why"), [(CUDA_ONLY, "a machine without CUDA"), (POSIX_ONLY, "Windows")])
def test_importing_the_package_needs_no_package_of_one_platform(packages: set[str], why: str) -> None:
    found = [
        f"{place(file, node)} imports {name}"
        for file in EVERYTHING
        for node in at_import_time(tree_of(file))
        for name in imported(node)
        if name in packages
    ]
    assert not found, f"{why} has no such package; import it in the function that uses it: {found}"


def test_importing_the_package_touches_no_accelerator() -> None:
    found = [
        place(file, node)
        for file in PACKAGE
        for node in at_import_time(tree_of(file))
        if isinstance(node, ast.Call) and re.match(r"torch\.(cuda|accelerator|xpu|mps)\.", ast.unparse(node.func))
    ]
    assert not found, f"asked at import time, before a run has chosen its device: {found}"


def test_text_files_name_their_encoding() -> None:
    """A text file's encoding is the locale's otherwise, which is not UTF-8 on every machine."""
    silent = [
        place(file, call)
        for file in EVERYTHING
        for call, name in calls(tree_of(file))
        if reads_or_writes_text(call, name) and not any(key.arg in ("encoding", None) for key in call.keywords)
    ]
    assert not silent, f"say encoding='utf-8': {silent}"


def reads_or_writes_text(call: ast.Call, name: str) -> bool:
    if name in ("read_text", "write_text"):
        return True
    if name != "open" or ast.unparse(call.func) in ("os.open", "webbrowser.open", "zipfile.ZipFile.open"):
        return False
    given = [*call.args, *(key.value for key in call.keywords if key.arg == "mode")]
    modes = [a.value for a in given if isinstance(a, ast.Constant) and re.fullmatch("[rwaxbt+U]+", str(a.value))]
    return not any("b" in str(mode) for mode in modes)


@pytest.mark.parametrize("source", ["open(p)", "open(p, 'w')", "p.open()", "p.read_text()", "p.write_text(t)"])
def test_the_encoding_rule_sees_each_way_to_open_a_text_file(source: str) -> None:
    found = [reads_or_writes_text(call, name) for call, name in calls(ast.parse(source))]
    assert found == [True]


def test_no_file_outgrows_one_sitting() -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in PACKAGE}
    long = [f"{file.relative_to(ROOT).as_posix()} has {count}" for file, count in lines.items() if count > LONGEST_FILE]
    assert not long, f"look for a seam past {LONGEST_FILE} lines: {long}"


def test_every_room_says_what_it_is_for() -> None:
    silent = [
        file.relative_to(ROOT).as_posix()
        for file in PACKAGE
        if file.name != "__main__.py" and not ast.get_docstring(tree_of(file))
    ]
    assert not silent, f"no module docstring: {silent}"
