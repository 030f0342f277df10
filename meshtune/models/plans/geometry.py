"""How the layers of a region are cut: along which heads, which stacked blocks, with which local counts."""

from __future__ import annotations

import itertools
import re
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from meshtune.errors import LayoutError
from meshtune.layout.pieces import Cut
from meshtune.layout.plan import Group, Plan, Split
from meshtune.models.plans.choices import Choice, Unfit
from meshtune.models.plans.regions import Experts, Part, Region, head_count

_KV_HEADS = re.compile(r"^(num_(key_value|kv)_heads|n_kv_heads?|num_k_heads)$")
_HEADS = re.compile(r"^(num_(attention_|attn_|q_)?heads|n_heads?)$")
_GROUPS = re.compile(r"^(num_key_value_groups|num_kv_groups|kv_groups|n_rep|num_queries_per_kv)$")
_WIDTHS = re.compile(r"^(hidden_size|embed_dim|split_size|inner_dim|all_head_size|d_model|attn_dim|num_heads_size)$")


def realise(region: Region, block: nn.Module, config: PreTrainedConfig, choice: Choice, size: int) -> Plan:
    """The rules of one region, by names within `block`, for `size` tp ranks.

    Raises Unfit if the shapes do not allow this choice, LayoutError if no choice can cut it among so many ranks.
    """
    if choice.border in ("child", "adding") and not region.path:
        raise Unfit("the block itself cannot be a split")
    plans = [_Cutter(part, block, config, choice, size).plan() for part in region.parts]
    plan = Plan().joined(*plans)
    if choice.border in ("child", "adding"):
        split = Split((region.path,), (region.path,), choice.border == "adding")
    elif choice.border == "part":
        holders = tuple(part.parent for part in region.parts)
        if not all(holders):
            raise Unfit("the block itself cannot be a split")
        split = Split(holders, holders)
    else:
        entries = [part.columns if isinstance(part, Part) else (part.parent,) for part in region.parts]
        exits = tuple(part.row if isinstance(part, Part) else part.parent for part in region.parts)
        split = Split(tuple(itertools.chain.from_iterable(entries)), exits)
    inside = split.entries if choice.border != "layers" else tuple(part.parent for part in region.parts if part.parent)
    shared = {
        name
        for name, _ in block.named_parameters()
        if name not in plan.cuts and any(name.startswith(f"{path}.") for path in inside)
    }
    return plan.joined(Plan(splits=(split,), shared=frozenset(shared | plan.divided)))


class _Cutter:
    """Cuts one part of a region."""

    def __init__(self, part: Part | Experts, block: nn.Module, config: PreTrainedConfig, choice: Choice, size: int):
        self.part, self.block, self.choice, self.size = part, block, choice, size
        self.config = config.get_text_config(decoder=True)
        self.holder = block.get_submodule(part.parent)
        self.cuts: dict[str, Cut] = {}
        self.selected: dict[str, tuple[Group, ...]] = {}
        self.divided: set[str] = set()
        self.gathered: set[str] = set()
        self.attributes: dict[str, dict[str, Any]] = {}
        self.head_inputs: dict[str, int] = {}

    def plan(self) -> Plan:
        if isinstance(self.part, Experts):
            self._experts(self.part)
        elif self._is_attention(self.part):
            self._attention(self.part)
        else:
            self._feed_forward(self.part)
        return Plan(
            cuts=self.cuts,
            divided=frozenset(self.divided),
            gathered=frozenset(self.gathered),
            selected=self.selected,
            attributes=self.attributes,
            head_inputs=self.head_inputs,
        )

    def _is_attention(self, part: Part) -> bool:
        return head_count(self.holder) is not None or bool(
            re.search(r"attn|attention", part.parent.rpartition(".")[2].lower())
        )

    # --- feed-forward

    def _feed_forward(self, part: Part) -> None:
        inner = _in_features(self.block.get_submodule(part.row))
        if inner < self.size:
            raise LayoutError(f"its inner width {inner} cannot be shared out among {self.size} tp ranks")
        for name in part.columns:
            self._column(name, self._blocks(_out_features(self.block.get_submodule(name)), inner), unit=1)
        self._row(part.row, inner, 1)

    def _blocks(self, outer: int, inner: int) -> tuple[int, ...]:
        """A projection as wide as the inner layer, or several such, stacked or interleaved."""
        if outer == inner:
            return (inner,)
        if outer % inner:
            raise Unfit(f"{outer} features do not feed {inner}")
        if self.choice.stacked:
            return (inner,) * (outer // inner)
        if inner % self.size:
            raise Unfit("interleaved features are cut evenly only")
        return (outer,)

    # --- attention

    def _attention(self, part: Part) -> None:
        inner = _in_features(self.block.get_submodule(part.row))
        heads = head_count(self.holder) or getattr(self.config, "num_attention_heads", 0)
        if not heads or inner % heads:
            raise Unfit(f"{inner} features are not those of {heads} heads")
        if heads % self.size:
            raise LayoutError(f"its {heads} attention heads cannot be shared out among {self.size} tp ranks")
        kv_heads = self._kv_heads(heads)
        widths = {heads * inner // heads, kv_heads * inner // heads}
        for name in part.columns:
            outer = _out_features(self.block.get_submodule(name))
            widths.add(outer)
            groups = self._groups(outer, heads, kv_heads, inner // heads, single=len(part.columns) == 1)
            if all(group.count % self.size == 0 for group in groups):
                self._column(name, tuple(group.length for group in groups), unit=1)
            elif all(group.count % self.size == 0 or self.size % group.count == 0 for group in groups):
                self.selected[name] = groups
            else:
                raise LayoutError(f"its {kv_heads} key-value heads cannot be shared out among {self.size} tp ranks")
        self._row(part.row, inner, inner // heads)
        self._norms(widths, inner // heads)
        for name, p in self.holder._parameters.items():
            if p is not None and p.ndim == 1 and p.numel() == heads:
                self.cuts[f"{part.parent}.{name}"] = Cut("tp", 0, (heads,))
        self._local_counts(heads, kv_heads, inner)
        if self.choice.biases:
            self.head_inputs[self.part.parent] = heads

    def _kv_heads(self, heads: int) -> int:
        own = next((v for k, v in vars(self.holder).items() if _KV_HEADS.search(k) and type(v) is int), None)
        groups = next((v for k, v in vars(self.holder).items() if _GROUPS.search(k) and type(v) is int), None)
        if own is None and groups:
            own = heads // groups
        return own or getattr(self.config, "num_key_value_heads", None) or heads

    def _groups(self, outer: int, heads: int, kv_heads: int, width: int, single: bool) -> tuple[Group, ...]:
        """What a projection's output features are: some heads, or q, k and v in one."""
        if single and outer == (heads + 2 * kv_heads) * width:
            if self.choice.stacked:
                q, kv = heads * width, kv_heads * width
                return Group(0, q, heads), Group(q, kv, kv_heads), Group(q + kv, kv, kv_heads)
            return (Group(0, outer, kv_heads),)
        if kv_heads != heads and outer == kv_heads * width:
            return (Group(0, outer, kv_heads),)
        if outer % heads == 0 and not (kv_heads != heads and outer < heads * width and outer % kv_heads == 0):
            return (Group(0, outer, heads),)
        if outer % kv_heads == 0:
            return (Group(0, outer, kv_heads),)
        raise Unfit(f"{outer} features are not those of {heads} heads, nor of {kv_heads}")

    def _norms(self, widths: set[int], head_width: int) -> None:
        """Normalisations of queries and keys over all heads at once."""
        for name, module in self.holder.named_modules():
            weight = module._parameters.get("weight")
            path = f"{self.part.parent}.{name}" if self.part.parent else name
            if not name or weight is None or list(module.children()) or path in self.part.columns:
                continue
            if weight.ndim == 1 and weight.numel() in widths and weight.numel() != head_width:
                if self.choice.norms == "gather":
                    self.gathered.add(path)
                else:
                    self._cut_all(path, module)
            elif weight.ndim == 2 and weight.shape[-1] == head_width and weight.shape[0] > 1 and not _dense(module):
                self._cut_all(path, module)

    def _cut_all(self, path: str, module: nn.Module) -> None:
        for leaf, p in module._parameters.items():
            if p is not None:
                if p.shape[0] % self.size:
                    raise Unfit(f"{path}.{leaf} has {p.shape[0]} rows")
                self.cuts[f"{path}.{leaf}"] = Cut("tp", 0, (p.shape[0],))

    def _local_counts(self, heads: int, kv_heads: int, inner: int) -> None:
        local, local_kv = heads // self.size, max(kv_heads // self.size, 1)
        values: dict[str, Any] = {}
        for name, value in vars(self.holder).items():
            if type(value) is not int:
                continue
            if _HEADS.search(name) and value == heads:
                values[name] = local
            elif _KV_HEADS.search(name) and value == kv_heads:
                values[name] = local_kv
            elif _GROUPS.search(name):
                values[name] = local // local_kv
            elif self.choice.counts != "own" and _WIDTHS.search(name) and value == inner:
                values[name] = inner // self.size
        if self.choice.counts == "config":
            values["config"] = {
                name: local if _HEADS.search(name) else local_kv
                for name, value in self.config.to_dict().items()
                if (_HEADS.search(name) and value == heads) or (_KV_HEADS.search(name) and value == kv_heads)
            }
        if values:
            self.attributes[self.part.parent] = values

    # --- experts

    def _experts(self, part: Experts) -> None:
        hidden = self.config.hidden_size
        tensors = {name: p for name, p in self.holder._parameters.items() if p is not None}
        (row, *more) = [name for name in part.rows if tensors[name].ndim == 3]
        if more:
            raise Unfit(f"{part.parent} has more than one output projection")
        shapes = [tensors[name].shape for name in part.columns if tensors[name].ndim == 3]
        transposed = getattr(self.holder, "is_transposed", False) or any(
            shape[-2] == hidden != shape[-1] for shape in shapes
        )
        dim = _inner_dim(tensors[row], hidden, -2 if transposed else -1)
        inner = tensors[row].shape[dim]
        if inner < self.size:
            raise LayoutError(f"the inner width {inner} of its experts cannot be shared out among {self.size} tp ranks")
        for name in (*part.columns, *part.rows):
            tensor, path = tensors[name], f"{part.parent}.{name}"
            if name in part.rows:
                if name == row:
                    self.cuts[path] = Cut("tp", dim, (inner,))
                else:
                    self.divided.add(path)
                continue
            at = _inner_dim(tensor, hidden, -1 if transposed else -2) if tensor.ndim == 3 else -1
            self.cuts[path] = Cut("tp", at, self._blocks(tensor.shape[at], inner))

    # --- layers

    def _column(self, name: str, blocks: tuple[int, ...], unit: int) -> None:
        layer = self.block.get_submodule(name)
        if isinstance(layer, Conv1D):
            self.attributes[name] = {"nf": sum(length for _, length in Cut("tp", 1, blocks, unit).spans(self.size, 0))}
        self.cuts[f"{name}.weight"] = Cut("tp", 1 if isinstance(layer, Conv1D) else 0, blocks, unit)
        if getattr(layer, "bias", None) is not None:
            self.cuts[f"{name}.bias"] = Cut("tp", 0, blocks, unit)

    def _row(self, name: str, inner: int, unit: int) -> None:
        layer = self.block.get_submodule(name)
        self.cuts[f"{name}.weight"] = Cut("tp", 0 if isinstance(layer, Conv1D) else 1, (inner,), unit)
        if getattr(layer, "bias", None) is not None:
            self.divided.add(f"{name}.bias")


def _dense(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | nn.Embedding)


def _inner_dim(tensor: Tensor, hidden: int, otherwise: int) -> int:
    """Which of the last two dimensions is not the hidden size."""
    first, last = tensor.shape[-2:]
    if first == hidden and last != hidden:
        return -1
    if last == hidden and first != hidden:
        return -2
    return otherwise


def _in_features(layer: nn.Module) -> int:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight.shape[0 if isinstance(layer, Conv1D) else 1]


def _out_features(layer: nn.Module) -> int:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight.shape[1 if isinstance(layer, Conv1D) else 0]
