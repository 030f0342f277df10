"""Layout: who holds what, and who shares what with whom. Every other room asks it; nobody else computes a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshtune.errors import LayoutError
from meshtune.layout.axes import AXES, EXPERT_AXES, VIEWS
from meshtune.layout.section import DistributedSection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from meshtune.layout.peers import Peers

_AVAILABLE: frozenset[str] = frozenset({"tp", "cp", "ep", "pp"})


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis for one world size, and, once `connect`ed, the device mesh.

    `degrees` maps each name in `AXES` to its size; their product is the world size. Without a connection, sizes can be
    asked but not ranks or groups, so that a recipe can be checked on a machine that has none of the ranks.
    """

    degrees: dict[str, int]
    strategy: str = "fsdp2"
    device_type: str = "cpu"
    ep: int = 1
    sequence_parallel: bool = False
    cp_method: str = "allgather"
    _mesh: list[DeviceMesh] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def resolve(cls, section: DistributedSection, world_size: int, device_type: str = "cpu") -> Layout:
        """The layout of `section` on `world_size` ranks. Raises LayoutError listing every misfit."""
        fixed = {"pp": section.pp_size, "cp": section.cp_size, "tp": section.tp_size}
        rest = "dp_replicate" if section.strategy == "ddp" else "dp_shard"
        if rest == "dp_shard":
            fixed["dp_replicate"] = section.dp_replicate_size
        product = math.prod(fixed.values())
        if world_size % product:
            keys = {f"{axis}_size": size for axis, size in fixed.items() if size != 1}
            raise LayoutError(
                f"distributed.{next(iter(keys))}: {' x '.join(f'{key} {size}' for key, size in keys.items())} needs a number of "
                f"ranks that is a multiple of {product}, found {world_size}; start "
                f"{_nearest_multiples(world_size, product)}, or lower a size"
            )
        degrees = {axis: fixed.get(axis, world_size // product if axis == rest else 1) for axis in AXES}
        layout = cls(
            degrees,
            section.strategy,
            device_type,
            section.ep_size,
            section.sequence_parallel,
            section.cp_method or "allgather",
        )
        room = layout.size("fsdp") * layout.size("tp")
        if room % section.ep_size:
            raise LayoutError(
                f"distributed.ep_size: {section.ep_size} must divide dp_shard {degrees['dp_shard']} x cp {degrees['cp']} x "
                f"tp {degrees['tp']} = {room}, the ranks among which experts are shared out; write a divisor of {room}, or "
                "change the ranks"
            )
        return layout

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    def problems(self, model_facts: dict[str, Any]) -> Iterable[str]:
        """Everything that keeps this layout from running a model with these facts, all at once.

        Data parallelism fits every model; the axes that split a model add their rules here.
        """
        for axis in ("tp", "cp", "pp", "ep"):
            if self.size(axis) > 1 and axis not in _AVAILABLE:
                yield f"distributed.{axis}_size: {self.size(axis)} is not supported yet; write {axis}_size: 1"
        heads, tp = model_facts.get("num_attention_heads"), self.size("tp")
        if isinstance(heads, int) and heads % tp:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            yield f"distributed.tp_size: {tp} ranks cannot share out {heads} attention heads evenly; write one of {divisors}"

    def check(self, model_facts: dict[str, Any]) -> None:
        """Raises LayoutError with every problem of a model with these facts."""
        if found := list(self.problems(model_facts)):
            raise LayoutError("\n".join(found))

    def connect(self) -> Layout:
        """Build the device mesh. `torch.distributed` must be initialised with `world_size` ranks. Returns self."""
        from torch.distributed import init_device_mesh

        if not self._mesh:
            shape = tuple(self.degrees[axis] for axis in AXES)
            self._mesh.append(init_device_mesh(self.device_type, shape, mesh_dim_names=AXES))
            if self.ep > 1:
                shape = tuple(self.size(axis) for axis in EXPERT_AXES)
                self._mesh.append(init_device_mesh(self.device_type, shape, mesh_dim_names=EXPERT_AXES))
        return self

    @property
    def mesh(self) -> DeviceMesh:
        """The 5-dimensional mesh, one dimension per axis of `AXES`."""
        if not self._mesh:
            raise RuntimeError("this layout is not connected to any ranks: call connect() first")
        return self._mesh[0]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks as 4 dimensions, one per axis of `EXPERT_AXES`; there only if `ep` is more than 1."""
        _ = self.mesh
        return self._mesh[1]

    def size(self, name: str) -> int:
        """Number of ranks along an axis or a view."""
        if name == "ep":
            return self.ep
        if name == "efsdp":
            return self.size("fsdp") * self.size("tp") // self.ep
        return math.prod(self.degrees[axis] for axis in self._axes(name))

    def rank(self, name: str) -> int:
        """This rank's coordinate along an axis or a view, in `range(size(name))`."""
        return self._mesh_of(name).get_local_rank()

    def group(self, name: str) -> ProcessGroup:
        """The ranks that differ from this one only along an axis or a view."""
        return self._mesh_of(name).get_group()

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of any rank along every axis, `efsdp` and `ep` too. Needs no connection."""
        found, rest = {}, rank
        for axis in reversed(AXES):
            rest, found[axis] = divmod(rest, self.degrees[axis])
        inner = (found["dp_shard"] * self.size("cp") + found["cp"]) * self.size("tp") + found["tp"]
        found["efsdp"], found["ep"] = divmod(inner, self.ep)
        return found

    def groups(self, name: str) -> list[list[int]]:
        """The ranks of each group along an axis or view. Needs no connection."""
        inside = (name,) if name in ("ep", "efsdp") else self._axes(name)
        kin = EXPERT_AXES if name in ("ep", "efsdp") else AXES
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[axis] for axis in kin if axis not in inside), []).append(rank)
        return list(groups.values())

    @property
    def counts_rows(self) -> bool:
        """Whether this rank speaks for the rows that it has read: of those that differ in cp, tp or pp alone, the first does."""
        return all(self.rank(axis) == 0 for axis in ("pp", "cp", "tp"))

    def peers(self, name: str) -> Peers:
        """The same ranks, as what differentiable collectives run over."""
        from meshtune.layout.peers import RankPeers

        if name not in self._peers:
            self._peers[name] = RankPeers(self.group(name))
        return self._peers[name]

    @cached_property
    def _peers(self) -> dict[str, Peers]:
        return {}

    def _mesh_of(self, name: str) -> DeviceMesh:
        if name in ("ep", "efsdp"):
            return self.expert_mesh[name]
        return self.mesh[name] if name in AXES else self._views[name]

    @cached_property
    def _views(self) -> dict[str, DeviceMesh]:
        flat = {name: self.mesh[axes] for name, axes in VIEWS.items()}
        return {name: mesh._flatten(name) for name, mesh in flat.items()}

    @property
    def data_parallel_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 2-D `(dp_replicate, fsdp)` for HSDP, else 1-D `fsdp`."""
        shard = self._views["fsdp"]
        if self.size("dp_replicate") == 1:
            return shard
        return self._replicate_and_shard

    @cached_property
    def _replicate_and_shard(self) -> DeviceMesh:
        _ = self._views
        return self.mesh[("dp_replicate", "fsdp")] if self.size("cp") > 1 else self.mesh[("dp_replicate", "dp_shard")]

    @property
    def expert_data_parallel_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts: 2-D `(dp_replicate, efsdp)`, or 1-D `efsdp`."""
        replicated = self.size("dp_replicate") > 1
        return self.expert_mesh[("dp_replicate", "efsdp")] if replicated else self.expert_mesh["efsdp"]

    def describe(self) -> dict[str, Any]:
        """Strategy, world size, degrees and derived views, as stored in the run folder."""
        return {
            "strategy": self.strategy,
            "world_size": self.world_size,
            "axes": {**self.degrees, "ep": self.ep},
            "views": {name: self.size(name) for name in (*VIEWS, "efsdp") if name != "world"},
            "sequence_parallel": self.sequence_parallel,
        }

    def summary(self) -> str:
        """One line for people: `fsdp2 on 4 ranks: dp_replicate 2 x dp_shard 2`."""
        sizes = [(axis, size) for axis, size in self.degrees.items() if size > 1]
        used = " x ".join(f"{axis} {size}" for axis, size in sizes) or "one rank"
        used += f", experts over ep {self.ep}" * (self.ep > 1) + ", sequence parallel" * self.sequence_parallel
        return f"{self.strategy} on {self.world_size} rank{'s' * (self.world_size > 1)}: {used}"

    def _axes(self, name: str) -> tuple[str, ...]:
        return (name,) if name in AXES else VIEWS[name]


def _nearest_multiples(world_size: int, product: int) -> str:
    below = world_size // product * product
    return f"{below} or {below + product}" if below else str(product)
