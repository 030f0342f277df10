"""The coverage page: whom it has to cover, and that it was made by what stands beside it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig

from meshtune.layout.section import DistributedSection
from meshtune.models.source import causal_lm
from meshtune.verify.layouts import parse
from meshtune.verify.report import Report, Verdict

ROOT = Path(__file__).resolve().parents[2]
WANTED = """
llama llama4_text qwen2 qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text deepseek_v2 deepseek_v3 deepseek_v4 gemma gemma2
gemma3_text gemma3n_text gemma4_text mistral ministral mixtral glm4 glm4_moe glm_moe_dsa minimax minimax_m2 ernie4_5 ernie4_5_moe
mimo_v2_flash gpt_oss phi3 olmo2 olmo3 olmoe granite cohere2 smollm3 seed_oss starcoder2 nemotron nemotron_h kimi_linear exaone4
hunyuan_v1_dense falcon gpt2 gpt_neox opt bloom stablelm
"""
WANTED_LAYOUTS = ["fsdp2", "hsdp", "tp2", "tp2+sp", "cp2", "ep2", "pp2", "fsdp2xtp2", "pp2xfsdp2xtp2", "ep4xtp2"]


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_page", ROOT / "docs" / "coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_architecture_that_users_name_is_covered(coverage: ModuleType) -> None:
    types = [one.model_type for one in coverage.ARCHITECTURES]
    assert set(WANTED.split()) <= set(types)
    assert len(set(types)) >= 60
    assert len({one.title for one in coverage.ARCHITECTURES}) == len(types)
    for one in coverage.ARCHITECTURES:
        causal_lm(AutoConfig.for_model(one.model_type, **one.values))


def test_every_layout_is_covered(coverage: ModuleType) -> None:
    assert set(WANTED_LAYOUTS) <= set(coverage.LAYOUTS)
    for name in coverage.LAYOUTS:
        parse(name, DistributedSection())


def test_a_cell_says_what_was_found(coverage: ModuleType) -> None:
    verdicts = [
        Verdict("fsdp2", 2, "exact"),
        Verdict("tp2", 2, "failing", "sgd: loss of step 1\n<differs>"),
        Verdict("cp2", 2, "refused", "no\nway"),
        Verdict("ep2", 2, "refused", "no experts"),
        Verdict("ep4xtp2", 4, "refused", "no experts"),
    ]
    report = Report("some", "Some", 1, {}, experts=False, packed=True, attention="sdpa", verdicts=verdicts)
    page = coverage.render({"Some": report}, [verdict.layout for verdict in verdicts])
    assert "| Some | packed | **exact** | **FAILING** | refused | - | - |" in page
    assert "- tp2: sgd: loss of step 1 &lt;differs>" in page and "- cp2: no way" in page
    assert "no experts" not in page.split("## Reasons")[1]
    assert "1 architectures; 1 exact, 1 refused, 1 failing." in page


def test_the_page_has_a_row_for_each_and_no_failing_cell(coverage: ModuleType) -> None:
    page = coverage.PAGE.read_text(encoding="utf-8")
    header, *rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert header[2:] == [*coverage.LAYOUTS[:-1], f"{coverage.LAYOUTS[-1]} |"]
    assert [row[0].removeprefix("| ") for row in rows] == [one.title for one in coverage.ARCHITECTURES]
    assert "FAILING" not in "".join(cell for row in rows for cell in row), "run: make coverage"
