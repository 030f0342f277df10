"""Loading, initialising and exporting in shards: every rank holds its part only, and the whole is that of one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtune.errors import ModelError
from meshtune.layout import DistributedSection, Layout, Plan
from meshtune.models import hf
from meshtune.models.causal_lm import CausalLM
from meshtune.models.export import export
from meshtune.models.initialize import fill, initialize
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, causal_lm
from meshtune.parallel import Settings, Sharded, replicate, shard
from tests.ranks import Ranks
from tests.unit.models_tiny import save_tiny, saved_source, tiny_config

CPU = torch.device("cpu")
# hrm_text's checkpoint joins queries, keys, values and gates that the model has apart, along the dimension that is sharded.
NAMES = ["llama-odd", "llama-tied", "gemma2", "cohere2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
NAMES += ["gpt2", "bert", "mamba", "hrm_text"]
FEW = ["llama-odd", "mixtral", "gpt_oss", "hrm_text"]


def sharded(source: Source, replicas: int = 1, strategy: str = "fsdp2", **settings: Any) -> CausalLM:
    """As a run builds it, before any weight is read."""
    model = hf.build(source, "eager")
    root = CausalLM(model)
    section = DistributedSection(strategy=strategy, dp_replicate_size=replicas)
    layout = Layout.resolve(section, dist.get_world_size()).connect()
    shard(root, model, layout, Plan(tuple(hf.unit_names(model))), Settings(**settings))
    return root


def whole(model: PreTrainedModel) -> dict[str, Tensor]:
    state = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def is_equal(found: dict[str, Tensor], wanted: PreTrainedModel) -> bool:
    theirs = {**wanted.state_dict(), **dict(wanted.named_buffers())}
    return found.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in found.items())


def load_all(folder: str, names: list[str], replicas: int) -> dict[str, bool]:
    equal = {}
    for name in names:
        source = saved_source(Path(folder) / name)
        model = sharded(source, replicas).model
        hf.load(model, source, CPU)
        tied = all(model.get_parameter(a) is model.get_parameter(b) for a, b in model.all_tied_weights_keys.items())
        shards = all(isinstance(parameter, DTensor) for parameter in model.parameters())
        plain = AutoModelForCausalLM.from_pretrained(folder + "/" + name, dtype=torch.float32)
        equal[name] = tied and shards and is_equal(whole(model), plain)
    return equal


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in NAMES:
        save_tiny(name, folder / name, max_shard_size="60KB")
    return folder


@pytest.mark.parametrize(
    ("world_size", "replicas", "names"),
    [(2, 1, NAMES), (3, 1, FEW), (4, 2, FEW)],
    ids=["fsdp2-2", "fsdp2-3", "hsdp-2x2"],
)
def test_sharded_loading_is_bit_equal_to_from_pretrained(
    checkpoints: Path, ranks: Ranks, world_size: int, replicas: int, names: list[str]
) -> None:
    """On 3 ranks one has no expert of 4, and of 97 rows the ranks have 33, 33 and 31."""
    for equal in ranks.call(world_size, load_all, str(checkpoints), names, replicas):
        assert equal == dict.fromkeys(names, True)


class _Peak(TorchDispatchMode):
    """The most bytes that plain tensors made while it is active hold at one time. A DTensor says the size of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not isinstance(tensor, DTensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 512, "head_dim": 24}


def peaks(folder: str) -> list[int]:
    """Most bytes held while loading, and while initialising, and while writing; with the bytes of the whole model and of its
    largest tensor."""
    import os

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # other threads are not watched
    found = []
    works: list[Callable[[PreTrainedModel, Source], None]] = [
        lambda model, source: hf.load(model, source, CPU),
        lambda model, source: initialize(model, 1, CPU),
    ]
    for work in works:
        source = saved_source(Path(folder))
        model = sharded(source).model
        with _Peak() as watch:
            work(model, source)
        found.append(watch.peak)
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    layer = sum(parameter.numel() * 4 for parameter in model.model.layers[0].parameters())
    return [*found, sum(sizes), max(sizes), layer]


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, ranks: Ranks) -> None:
    """Half of it, and what is at hand: one tensor while loading, one block while initialising."""
    save_tiny("llama", tmp_path, **SIZES)
    for load, init, model, largest, layer in ranks.call(2, peaks, str(tmp_path)):
        assert load <= model / 2 + 2 * largest < 0.8 * model
        assert init <= model / 2 + 2 * max(largest, layer) < 0.9 * model


def misfits(folder: str) -> list[str]:
    """Errors of a tensor too long by one row (each shard of it has the wanted shape), and of unequal tied weights."""
    errors = []
    for name in ("longer", "untied"):
        source = saved_source(Path(folder) / name)
        try:
            hf.load(sharded(source).model, source, CPU)
            errors.append("")
        except ModelError as error:
            errors.append(str(error))
    return errors


def test_what_shards_would_hide_is_an_error_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    """C65, C73: shapes are compared whole; tied weights that differ in one row only, which one rank alone holds."""
    longer = save_tiny("llama", tmp_path / "longer") / "model.safetensors"
    tensors = load_file(longer)
    save_file({**tensors, "lm_head.weight": torch.zeros(98, 48)}, longer, metadata={"format": "pt"})
    untied = save_tiny("llama-tied", tmp_path / "untied") / "model.safetensors"
    tensors = load_file(untied)
    head = tensors["model.embed_tokens.weight"].clone()
    head[96] += 1
    save_file({**tensors, "lm_head.weight": head}, untied, metadata={"format": "pt"})
    for errors in ranks.call(2, misfits, str(tmp_path)):
        assert "lm_head.weight has shape (98, 48) in the checkpoint and (97, 48) in the model" in errors[0]
        assert "ties lm_head.weight to model.embed_tokens.weight" in errors[1]


RANDOM = ["llama-tied", "gemma3", "mixtral", "gpt2", "mamba"]


def random_weights(replicas: int = 1) -> dict[str, dict[str, Tensor]]:
    states = {}
    for name in RANDOM:
        model_class, config = causal_lm(tiny_config(name))
        source = Source(ModelSection(name=name, weights="random"), name, config, model_class)
        model = sharded(source, replicas).model
        initialize(model, 5, CPU)
        filled = sharded(source, replicas).model
        initialize(filled, None, CPU)
        fill(filled, whole(model))
        assert all(torch.equal(a, b) for a, b in zip(whole(filled).values(), whole(model).values(), strict=True))
        states[name] = whole(model)
    return states if dist.get_rank() == 0 else {}


def test_random_weights_are_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    one = ranks.call(1, random_weights)[0]
    for world_size, replicas in ((2, 1), (3, 1)):
        other = ranks.call(world_size, random_weights, replicas)[0]
        for name in RANDOM:
            assert one[name].keys() == other[name].keys()
            assert all(torch.equal(tensor, other[name][path]) for path, tensor in one[name].items()), (name, world_size)


class _Full:
    """A tokenizer that cannot be written."""

    def save_pretrained(self, _: Path) -> None:
        raise OSError(28, "No space left on device")


def write(folder: str, names: list[str], strategy: str) -> list[str]:
    """Export each model as a run has it; return what a failing export raises here."""
    errors = []
    for name in names:
        source = saved_source(Path(folder) / name)
        root = sharded(source, strategy=strategy, activation_checkpointing="full")
        hf.load(root.model, source, CPU)
        layout = Layout.resolve(DistributedSection(strategy=strategy), dist.get_world_size()).connect()
        replicate(root, root.model, layout, Sharded(Plan()), Settings())
        export(root.model, source, None, Path(folder) / f"{strategy}-{name}")
    try:
        export(root.model, source, _Full(), Path(folder) / "failed")
    except OSError as error:
        errors.append(str(error))
    return errors


@pytest.mark.parametrize(("strategy", "names"), [("fsdp2", NAMES), ("ddp", FEW[:1])], ids=["fsdp2", "ddp"])
def test_an_export_from_shards_is_bit_identical_to_the_checkpoint(
    checkpoints: Path, ranks: Ranks, strategy: str, names: list[str]
) -> None:
    """By the names of the model and of no wrapper (C75); when rank 0 cannot write, no rank is left waiting (C71)."""
    raised = ranks.call(2, write, str(checkpoints), names, strategy)
    assert [len(errors) for errors in raised] == [1, 1] and all(
        "No space left on device" in errors[0] for errors in raised
    )
    for name in names:
        found, wanted = (_tensors(checkpoints / folder) for folder in (f"{strategy}-{name}", name))
        assert found.keys() == wanted.keys()
        for path, tensor in found.items():
            assert tensor.dtype == wanted[path].dtype and torch.equal(tensor, wanted[path]), (name, path)


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found
