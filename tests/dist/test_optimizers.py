"""Every optimizer on every way of cutting a model: the weights of the library's own optimizer on the whole model, bit for bit
where gradients are equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshtune.checkpoint.checkpoint import Checkpointer
from meshtune.errors import ModelError
from meshtune.layout.pieces import Cut, named_pieces, set_aliases, set_piece
from meshtune.models.placing import local_of, own_slice, positions
from meshtune.optim.build import Known
from meshtune.optim.methods import METHODS
from meshtune.optim.section import OptimizerSection
from tests.ranks import Ranks

RATE, DECAY, STEPS = 1e-2, 0.1, 4


class Experts(nn.Module):
    """As many matrices as experts in each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 96))


class Net(nn.Module):
    """A tied embedding, a fused projection of unequal parts, rows that four ranks cannot share equally, experts, vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(41, 64)
        self.fused = nn.Linear(64, 192)
        self.out = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.experts = Experts()
        self.head = nn.Linear(64, 41, bias=False)
        self.head.weight = self.embed.weight


CUTS = {"fused.weight": (0, (128, 64)), "fused.bias": (0, (128, 64)), "out.weight": (1, (128,))}


def sharded(net: Net, mesh: DeviceMesh, *placements: Any, only: Callable[[str], bool] = lambda name: True) -> None:
    for name, parameter in list(net.named_parameters()):
        if only(name):
            put(net, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))


def put(net: Net, name: str, parameter: nn.Parameter) -> None:
    module, _, key = name.rpartition(".")
    setattr(net.get_submodule(module), key, parameter)
    net.head.weight = net.embed.weight


def cut(net: Net, name: str, rule: Cut, rank: int) -> None:
    module, _, key = name.rpartition(".")
    whole = net.get_parameter(name).detach()
    piece = rule.piece(tuple(whole.shape), 2, rank)
    set_piece(net.get_submodule(module), key, piece)
    put(net, name, nn.Parameter(piece.of(whole)))


def fsdp(net: Net) -> None:
    sharded(net, init_device_mesh("cpu", (4,)), Shard(0))


def hsdp(net: Net) -> None:
    sharded(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), Replicate(), Shard(0))


def tp_and_fsdp(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for name, (dim, blocks) in CUTS.items():
        cut(net, name, Cut("tp", dim, blocks), mesh["tp"].get_local_rank())
    sharded(net, mesh["fsdp"], Shard(0))


def experts_apart(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    cut(net, "experts.up", Cut("ep", 0, (4,)), mesh["ep"].get_local_rank())
    sharded(net, mesh["efsdp"], Shard(0), only=lambda name: name.startswith("experts"))
    sharded(net, init_device_mesh("cpu", (4,)), Shard(0), only=lambda name: not name.startswith("experts"))


def stages(net: Net) -> None:
    """The first has the embedding, the last its copy; each shards over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    sharded(net, mesh["fsdp"], Shard(0))
    if mesh["pp"].get_local_rank() == 0:
        del net.out, net.norm, net.head
    else:
        del net.embed, net.fused, net.experts
        set_aliases(net, {"head.weight": "embed.weight"})


def copies(net: Net) -> None:
    """DDP: each rank has all."""


LAYOUTS = {f.__name__: f for f in (fsdp, hsdp, tp_and_fsdp, experts_apart, stages, copies)}


def gradients(step: int) -> dict[str, Tensor]:
    net = Net()
    torch.manual_seed(100 + step)
    return {name: torch.randn(p.shape) * 0.1 for name, p in net.named_parameters()}


def weight_decay(name: str) -> float:
    return 0.0 if "norm" in name or name.endswith("bias") else DECAY


def is_hidden(name: str) -> bool:
    return name in ("fused.weight", "out.weight", "experts.up")


def library(method: str, parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The library's own, on whole tensors."""
    import pytorch_optimizer
    import torchao.optim

    named = {name: {"params": [p], "weight_decay": weight_decay(name)} for name, p in parameters.items()}
    groups = list(named.values())
    hidden = [group for name, group in named.items() if is_hidden(name.partition("/")[0])]
    other = [group for name, group in named.items() if not is_hidden(name.partition("/")[0])]
    betas = {"betas": (0.9, 0.99), "eps": 1e-6}
    made: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
        "adamw": lambda: [torch.optim.AdamW(groups, lr=RATE, fused=True, **betas)],
        "sgd": lambda: [torch.optim.SGD(groups, lr=RATE, momentum=0.9)],
        "adafactor": lambda: [torch.optim.Adafactor(groups, lr=RATE)],
        "muon": lambda: [
            torch.optim.Muon(hidden, lr=RATE, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(other, lr=RATE, fused=True, **betas),
        ],
        "lion": lambda: [pytorch_optimizer.Lion(groups, lr=RATE, betas=(0.9, 0.99))],
        "soap": lambda: [pytorch_optimizer.SOAP(groups, lr=RATE, precondition_frequency=2, **betas)],
        "schedule_free_adamw": lambda: [pytorch_optimizer.ScheduleFreeAdamW(groups, lr=RATE, **betas)],
        "adamw_8bit": lambda: [torchao.optim.AdamW8bit(groups, lr=RATE, **betas)],
        "adamw_4bit": lambda: [torchao.optim.AdamW4bit(groups, lr=RATE, **betas)],
    }
    return made[method]()


def section(method: str) -> OptimizerSection:
    given: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-6, "momentum": 0.9, "precondition_frequency": 2}
    keys = METHODS[method].keys - ({"momentum"} if method == "muon" else set())
    return OptimizerSection(name=method, weight_decay=DECAY, **{k: v for k, v in given.items() if k in keys})


def wanted(method: str, count: int = STEPS) -> dict[str, Tensor]:
    """Whole weights after the steps; Muon and SOAP take each expert's matrix for itself."""
    torch.set_num_threads(1)
    whole = {name: p.detach().clone() for name, p in Net().named_parameters()}
    views: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        single = tensor.ndim == 3 and method in ("muon", "soap")
        views.update({f"{name}/{i}": tensor[i] for i in range(4)} if single else {name: tensor})
    parameters = {name: nn.Parameter(view) for name, view in views.items()}
    optimizers = library(method, parameters)
    for step in range(count):
        given = gradients(step)
        for name, parameter in parameters.items():
            base, _, index = name.partition("/")
            parameter.grad = given[base][int(index)] if index else given[base]
        for optimizer in optimizers:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    return whole


def optimizer_of(net: Net, method: str) -> torch.optim.Optimizer:
    names = [name for name, _ in net.named_parameters()]
    parts = {name: "muon" if is_hidden(name) else "adamw" for name in names} if method == "muon" else {}
    return section(method).build(net.named_modules(), RATE, Known(parts=parts, positions=positions(net), others=True))


def steps(net: Net, optimizer: torch.optim.Optimizer, which: Iterator[int]) -> None:
    pieces, held = named_pieces(net), positions(net)
    for step in which:
        given = gradients(step)
        for name, parameter in net.named_parameters():
            own = own_slice(given[held[parameter].name], parameter, pieces.get(name)).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                own = DTensor.from_local(
                    own, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
            parameter.grad = own
        optimizer.step()


def distances(method: str) -> dict[str, float]:
    """By layout, how far any weight of this rank is from the whole model's."""
    whole, found = wanted(method), {}
    for name, lay_out in LAYOUTS.items():
        net = Net()
        lay_out(net)
        steps(net, optimizer_of(net, method), iter(range(STEPS)))
        found[name] = distance(net, whole)
    return found


def distance(net: Net, whole: dict[str, Tensor]) -> float:
    """The largest difference of a weight of this rank."""
    pieces, held = named_pieces(net), positions(net)
    return max(
        (local_of(p.detach()) - own_slice(whole[held[p].name], p, pieces.get(n))).abs().max().item()
        for n, p in net.named_parameters()
        if local_of(p).numel()
    )


@pytest.mark.parametrize("method", list(METHODS))
def test_every_layout_updates_weights_as_the_library_does_on_the_whole_model(ranks: Ranks, method: str) -> None:
    for found in ranks.call(4, distances, method):
        assert found == dict.fromkeys(LAYOUTS, 0.0)


JOURNEY = (copies, fsdp, tp_and_fsdp, experts_apart, stages, hsdp)


def travel(method: str, run: str) -> float:
    """A step on each layout, by checkpoints from one to the next; how far any weight is then from the whole model's."""
    whole = wanted(method, len(JOURNEY))
    for step, lay_out in enumerate(JOURNEY):
        net = Net()
        with torch.no_grad():
            net.embed.weight.zero_()  # what is not loaded is seen
        lay_out(net)
        optimizer = optimizer_of(net, method)
        keeper = Checkpointer(Path(run), net, optimizer, 1)
        if step == 0:
            net.embed.weight.data.copy_(Net().embed.weight)
        else:
            keeper.load(Path(run) / "checkpoints" / f"step-{step}")
        steps(net, optimizer, iter([step]))
        keeper.save(step + 1, {})
    return distance(net, whole)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_optimizer_goes_on_exactly_on_any_other_layout(ranks: Ranks, method: str, tmp_path: Path) -> None:
    """C36, C69: moments, factors, eigenbases, quantised moments, counters in groups."""
    assert ranks.call(4, travel, method, str(tmp_path)) == [0.0] * 4


def build_unknown(method: str) -> str:
    net = Net()
    fsdp(net)
    with pytest.raises(ModelError) as raised:
        section(method).build(net.named_modules(), RATE)
    return str(raised.value)


def test_what_a_rank_holds_has_to_be_told(ranks: Ranks) -> None:
    """Else a part would be taken for the whole."""
    assert "adafactor updates whole tensors" in ranks.call(4, build_unknown, "adafactor")[0]
