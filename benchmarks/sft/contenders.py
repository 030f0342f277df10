"""Each contender in a process of its own: `python -m benchmarks.sft.contenders NAME FOLDER STEPS`.

Each writes a line `{"time", "tokens", "supervised"}` into FOLDER/steps.jsonl after each optimizer step: seconds since the epoch,
real (not padding) tokens of the step, and those that carry a loss. All run in float32 with AdamW (fused), clipping at 1.0, on
rows in file order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.sft.work import Work

LEARNING_RATE = 1e-4
IGNORED = -100


class Record:
    """Lines of steps, written by the first rank; tokens are those of all ranks where a contender tells them."""

    def __init__(self, folder: Path):
        self._file = (folder / "steps.jsonl").open("w", encoding="utf-8")

    def step(self, tokens: int, supervised: int) -> None:
        self._file.write(json.dumps({"time": time.time(), "tokens": tokens, "supervised": supervised}) + "\n")
        self._file.flush()


def bare_loop(folder: Path, steps: int, work: Work) -> None:
    """The loop that a user would write: padded rows, the model's own loss."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    rows, record = list(_tokenised(folder, tokenizer)), Record(folder)
    for step in range(steps):
        part = rows[step * work.micro_batch : (step + 1) * work.micro_batch]
        batch = _padded(part)
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.step(*_counts(part))


def trainer(folder: Path, steps: int, work: Work) -> None:
    """transformers' Trainer on rows tokenised beforehand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    seen: list[tuple[int, int]] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(_counts(rows))
        return _padded(rows)

    arguments = TrainingArguments(**_arguments(folder, steps, work))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    data = list(_tokenised(folder, tokenizer))
    Trainer(model, arguments, data_collator=collate, train_dataset=data, callbacks=[_recording(folder, seen)]).train()


def trl(folder: Path, steps: int, work: Work, more: dict[str, Any] | None = None, **mode: Any) -> None:
    """TRL's SFTTrainer on conversations, its own preparation included; `more` are further arguments of it."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    seen: list[tuple[int, int]] = []
    sizes = {"per_device_train_batch_size": work.packs} if mode.get("packing") else {}
    arguments = SFTConfig(
        **{**_arguments(folder, steps, work), **sizes, "gradient_checkpointing": False, **mode},
        max_length=None
        if mode.get("padding_free")
        else work.longest,  # TRL takes none beside padding_free; no row is longer
        assistant_only_loss=True,
        model_init_kwargs={"dtype": "float32"},
    )
    data = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / "hf"))
    tuner = SFTTrainer(
        str(folder / "model"), arguments, train_dataset=data, callbacks=[_recording(folder, seen)], **(more or {})
    )
    inner = tuner.data_collator

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(_counts(rows))
        return inner(rows)

    tuner.data_collator = collate
    tuner.train()


def meshtune(folder: Path, steps: int, work: Work, packing: bool) -> None:
    """meshtune, by the recipe that its command reads; what it logs is turned into lines of steps."""
    import meshtune as project

    project.train(recipe(folder, steps, work, packing))


def recipe(folder: Path, steps: int, work: Work, packing: bool) -> dict[str, Any]:
    """Padded rows, or packs of about as many tokens as the padded rows have real ones."""
    rows = work.packs if packing else work.micro_batch
    return {
        "model": {"name": str(folder / "model")},
        "data": {
            "train_path": str(folder / "train.jsonl"),
            "shuffle": False,
            "packing": packing,
            "max_seq_length": work.longest,
        },
        "distributed": {"strategy": "ddp"},
        "training": {
            "learning_rate": LEARNING_RATE,
            "max_steps": steps,
            "precision": "fp32",
            "per_device_batch_size": rows,
        },
        "lr_scheduler": {"name": "constant"},
        "checkpoint": {"dir": str(folder / "run"), "export": "none", "resume": "never"},
        "logging": {"progress": "none"},
    }


def _arguments(folder: Path, steps: int, work: Work) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": work.micro_batch,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def _recording(folder: Path, seen: list[tuple[int, int]]) -> Any:
    from transformers import TrainerCallback

    class Recording(TrainerCallback):
        """Batches are collated one ahead of the steps, in their order."""

        def on_train_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            self.record = Record(folder) if state.is_world_process_zero else None
            self.ranks = arguments.world_size

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if self.record is not None:
                tokens, supervised = seen[state.global_step - 1]
                self.record.step(tokens * self.ranks, supervised * self.ranks)

    return Recording()


def _tokenised(folder: Path, tokenizer: Any) -> Iterator[dict[str, list[int]]]:
    """Rows with the template's own assistant mask as labels."""
    with (folder / "train.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            marked = zip(row["input_ids"], row["assistant_masks"], strict=True)
            yield {"input_ids": row["input_ids"], "labels": [i if mask else IGNORED for i, mask in marked]}


def _padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=IGNORED),
    }


def _counts(rows: list[dict[str, Any]]) -> tuple[int, int]:
    supervised = sum(sum(label != IGNORED for label in row["labels"]) for row in rows)
    return sum(len(row["input_ids"]) for row in rows), supervised


CONTENDERS: dict[str, Callable[[Path, int, Work], None]] = {
    "bare loop": bare_loop,
    "Trainer": trainer,
    "TRL padded": lambda *work: trl(*work),
    "TRL padding-free": lambda *work: trl(*work, padding_free=True),
    "TRL packed": lambda *work: trl(*work, packing=True),
    "meshtune padded": lambda *work: meshtune(*work, packing=False),
    "meshtune": lambda *work: meshtune(*work, packing=True),
}


if __name__ == "__main__":
    name, place, count, settings = sys.argv[1:]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    CONTENDERS[name](Path(place), int(count), Work(**json.loads(settings)))
