"""How tensor parallelism cuts a quantised layer: as its weight [out, in] would be cut, where that falls between blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from meshtune.errors import LayoutError
from meshtune.layout import Layout, Plan
from meshtune.layout.pieces import Cut
from meshtune.models.quantization.linear import QuantizedLinear


def quantised_plan(plan: Plan, model: nn.Module, layout: Layout) -> Plan:
    """`plan` with the rows of quantised layers' tensors in the place of those of their weights [out, in].

    Raises LayoutError naming the layers that tensor parallelism would cut inside a block.
    """
    cuts = dict(plan.cuts)
    problems: dict[str, str] = {}
    for path, layer in model.named_modules():
        cut = cuts.get(f"{path}.weight") if isinstance(layer, QuantizedLinear) else None
        if cut is None or not isinstance(layer, QuantizedLinear):
            continue
        if (problem := _misfit(layer, cut, layout.size(cut.axis))) is not None:
            problems.setdefault(problem, path)
            continue
        cuts.update({f"{path}.{name}": own for name, own in _cuts(layer, cut)})
    if problems:
        raise LayoutError("\n".join(f"distributed.tp_size: {path} {problem}" for problem, path in problems.items()))
    return replace(plan, cuts=cuts)


def _cuts(layer: QuantizedLinear, cut: Cut) -> Iterator[tuple[str, Cut]]:
    for name, form in layer.codec.forms.items():
        if not form.rows or (cut.dim % 2 == 1 and form.every is None):
            continue  # belongs to the whole weight, or to whole rows, of which each rank has a part
        yield name, replace(cut, dim=0) if cut.dim % 2 == 0 else _narrower(cut, form.every or 1)


def _narrower(cut: Cut, every: int) -> Cut:
    """The same cut of a tensor in which one column stands for `every`."""
    return Cut(cut.axis, 1, tuple(block // every for block in cut.blocks), max(1, cut.unit // every))


def _misfit(layer: QuantizedLinear, cut: Cut, size: int) -> str | None:
    """Why a weight cannot be cut so, or None."""
    if cut.dim % 2 == 0:
        return None
    block = layer.codec.block or 1
    for rank in range(size):
        spans = cut.spans(size, rank)
        if any(start % block or length % block for start, length in spans):
            width = spans[0][1]
            return (
                f"[{layer.out_features}, {layer.in_features}] would be cut into parts of {width} columns, which are no whole "
                f"blocks of {block}; {_remedy(layer.in_features, size, block)}"
            )
        for form in layer.codec.forms.values():
            every = form.every or 1
            if form.rows and _narrower(cut, every).spans(size, rank) != tuple(
                (a // every, n // every) for a, n in spans
            ):
                return f"[{layer.out_features}, {layer.in_features}] cannot be cut by {cut} in its quantised form"
    return None


def _remedy(width: int, size: int, block: int) -> str:
    fits = [tp for tp in range(size - 1, 1, -1) if width % (tp * block) == 0]
    smaller = [n for n in (128, 64, 32) if n < block and width % (size * n) == 0]
    ways = [f"write tp_size: {fits[0] if fits else 1}"]
    if smaller:
        ways.append(f"quantization.block_size: {smaller[0]}")
    return ", ".join([*ways, "or name it in quantization.exclude_modules"])
