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


def loaded_by(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `code`."""
    report = f"import sys; print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


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


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import meshtune; meshtune.__version__", set()),
        ("import meshtune.cli", set()),
        ("import meshtune.config, meshtune.data.section, meshtune.layout.section", set()),
        ("import meshtune.recipes.recipe", set()),
    ],
)
def test_what_needs_no_tensor_loads_no_heavy_package(code: str, allowed: set[str]) -> None:
    """`--help`, the schema and a recipe's mistakes do not wait for transformers."""
    assert loaded_by(code) <= allowed


def test_public_names_are_there() -> None:
    for name in meshtune.__all__:
        assert getattr(meshtune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        meshtune.trian  # noqa: B018
