"""`meshtune verify`: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from meshtune.verify import beside
from meshtune.verify.course import Outcome, run
from tests.cli.conftest import Said

Command = Callable[..., Said]


def test_verify_tells_of_each_layout_and_writes_json(meshtune: Command, recipe: Path, tmp_path: Path) -> None:
    """It writes nothing else: no run folder, and no weight has to be there."""
    found = tmp_path / "found.json"
    before = set(tmp_path.rglob("*"))
    said = meshtune("verify", recipe, "data.packing=true", "--layouts", "fsdp2,ddp", "--json", found)
    assert said.code == 0, said.err
    assert "model       LlamaForCausalLM of " in said.out and "rows        packed, attention sdpa" in said.out
    assert "exact    fsdp2              2 ranks" in said.out
    assert "2 exact; " in said.out.splitlines()[-1]
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["passed"] and [v["layout"] for v in report["verdicts"]] == ["fsdp2", "ddp"]
    assert [one["optimizer"] for one in report["verdicts"][0]["comparisons"]] == ["sgd", "adamw"]
    assert set(tmp_path.rglob("*")) - before == {found}


def broken(*arguments: Any) -> Outcome:
    with patch("meshtune.optim.methods.ADAMW_BETAS", (0.5, 0.5 if os.environ["WORLD_SIZE"] == "2" else 0.9)):
        return run(*arguments)


def test_verify_ends_with_1_where_a_layout_fails(meshtune: Command, recipe: Path) -> None:
    with patch.object(beside, "_run", broken):
        said = meshtune("verify", recipe, "--layouts", "ddp")
    assert said.code == 1
    assert "failing  ddp" in said.out and "adamw: " in said.out and "1 failing" in said.out.splitlines()[-1]


def test_verify_ends_with_2_where_nothing_can_be_tried(meshtune: Command, recipe: Path) -> None:
    said = meshtune("verify", recipe, "--layouts", "fsdp2,tq2")
    assert said.code == 2 and "'tq2' is no layout" in said.err
    said = meshtune("verify", recipe, "data.train_path=none.jsonl")
    assert said.code == 2 and "data.train_path: " in said.err
