"""Single optimizer steps of the real path, and what can be seen in one below torch's Python: collectives, shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from meshtune.config import from_mapping
from meshtune.data import store
from meshtune.data.encoding import Encoded
from meshtune.data.report import DataReport
from meshtune.layout.world import connect
from meshtune.recipes import assembly
from meshtune.recipes.recipe import Recipe
from meshtune.recipes.run import Setup
from meshtune.training.signals import SignalStop

KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
}
Ranks = tuple[int, ...]
Counts = dict[tuple[str, Ranks], tuple[int, int]]
"""(kind, ranks) to how many there were, and the bytes of the tensors that were handed over or, if that is more, received."""


class Communication(TorchDispatchMode):
    """Counts what goes over more than one rank, whoever asks for it: DDP's own code too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        group = next(
            dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "Group" in str(a._type())
        )
        if group.size() == 1:
            return
        key = KINDS.get(name, name), tuple(sorted(dist.get_process_group_ranks(group)))
        size = max(t.numel() * t.element_size() for t in tree_leaves(args[:2]) if isinstance(t, Tensor))
        times, total = self.counts.get(key, (0, 0))
        self.counts[key] = times + 1, total + size


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operation makes or hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = (t for t in tree_leaves(out) if isinstance(t, Tensor) and t.device.type != "meta")
        self.found.update(tuple(t.shape) for t in made)
        return out


def save_model(folder: Path, architecture: str, values: dict[str, Any]) -> Path:
    """A model folder, with a tokenizer that has as many tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **values)).save_pretrained(folder)
    words = {f"token{i}": i for i in range(values["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="token0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="token0").save_pretrained(folder)
    return folder


def save_rows(folder: Path, count: int, length: int) -> Path:
    """Documents of one length, of which all is learnt."""
    draw = np.random.default_rng(0)
    rows = [Encoded(draw.integers(0, 64, length).astype(np.int32), np.ones(length, bool)) for _ in range(count)]
    with store.Writer(folder) as writer:
        writer.append(rows)
        report = DataReport(["drawn"], "text", length)
        report.documents, report.tokens = count, count * length
        report.measure(writer.lengths)
        writer.publish(report)
    return folder


@contextmanager
def steps(recipe: dict[str, Any], rows: Path) -> Iterator[tuple[Setup, Any]]:
    """A run that is set up, and what makes its next optimizer step."""
    with ExitStack() as held:
        setup = Setup(from_mapping(Recipe, recipe), connect("cpu"), held, rows=lambda _: (store.load(rows), {}))
        setup.model, parallel = assembly.build_model(setup, None)
        parts, state, _ = assembly.assemble(setup, parallel, SignalStop())

        def advance() -> Any:
            state.step += 1
            return parts.step(parts.loader.next(), state.step - 1, 1e-3)

        yield setup, advance
