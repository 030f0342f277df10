"""Each contender in a process of its own: `python -m benchmarks.adapters.contenders NAME METHOD KEPT FOLDER STEPS WORK`.

METHOD is `full`, `lora` or `qlora` (NF4 with double quantisation). KEPT says what the forward keeps for the backward: `all`, or
less of it by `selective` (meshtune alone) or `full` activation checkpointing. The rest is as in benchmarks/sft/contenders.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sft import contenders as sft
from benchmarks.sft.work import Work

RANK, ALPHA = 16, 32


def trl(method: str, kept: str, folder: Path, steps: int, work: Work, **mode: Any) -> None:
    """TRL's SFTTrainer with PEFT's LoraConfig; quantised by bitsandbytes through transformers."""
    if kept != "all":
        mode = {**mode, "gradient_checkpointing": True}
    more: dict[str, Any] = {}
    if method != "full":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    if method == "qlora":
        import torch
        from transformers import BitsAndBytesConfig

        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    sft.trl(folder, steps, work, more, **mode)


def meshtune(method: str, kept: str, folder: Path, steps: int, work: Work) -> None:
    """meshtune, by the recipe that its command reads."""
    import meshtune as project

    project.train(recipe(method, kept, folder, steps, work))


def recipe(method: str, kept: str, folder: Path, steps: int, work: Work) -> dict[str, Any]:
    """Packs of about as many tokens as the padded rows have real ones."""
    made = sft.recipe(folder, steps, work, packing=True)
    made["training"]["activation_checkpointing"] = {"all": "none"}.get(kept, kept)
    if method != "full":
        made["peft"] = {"r": RANK, "alpha": ALPHA, "target_modules": "all-linear"}
    if method == "qlora":
        made["quantization"] = {"type": "nf4", "double_quant": True}
    return made


CONTENDERS: dict[str, Callable[..., None]] = {
    "TRL padded": lambda *work: trl(*work),
    "TRL padding-free": lambda *work: trl(*work, padding_free=True),
    "TRL packed": lambda *work: trl(*work, packing=True),
    "meshtune": meshtune,
}


if __name__ == "__main__":
    name, method, kept, place, count, settings = sys.argv[1:]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    CONTENDERS[name](method, kept, Path(place), int(count), Work(**json.loads(settings)))
