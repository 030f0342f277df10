"""Rooms import downwards, every module imports, and the command line answers before torch is there."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshtune

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "pandas", "pyarrow")
# What must not be loaded after each statement; those that allow more come later.
LIGHT = (
    ("import meshtune; meshtune.__version__", (*HEAVY, "numpy", "rich")),
    ("import meshtune.config", (*HEAVY, "numpy", "rich")),
    ("import meshtune.observe", (*HEAVY, "rich")),
    ("import meshtune.data.section, meshtune.layout.section", HEAVY),
    ("import meshtune.cli", HEAVY),
    ("import meshtune.recipes.recipe", HEAVY),
)


def test_rooms_import_downwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract of pyproject.toml; `lint-imports` prints the chain of a broken one."""
    from importlinter.cli import lint_imports

    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


def test_every_module_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages(meshtune.__path__, "meshtune.")]
    assert len(names) > 50
    for name in names:
        if name != "meshtune.__main__":
            importlib.import_module(name)


def test_what_needs_no_tensor_loads_no_heavy_package() -> None:
    """`--help`, the schema and a recipe's mistakes do not wait for transformers. One interpreter, statement by statement."""
    code = "import sys\n" + "".join(
        f"{statement}\nprint([name for name in {unwanted!r} if name in sys.modules])\n" for statement, unwanted in LIGHT
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    assert dict(zip([statement for statement, _ in LIGHT], done.stdout.splitlines(), strict=True)) == {
        statement: "[]" for statement, _ in LIGHT
    }


def test_public_names_are_there() -> None:
    for name in meshtune.__all__:
        assert getattr(meshtune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        meshtune.trian  # noqa: B018
