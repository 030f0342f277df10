"""Quantised layers hold, compute and give gradients as the library's own layers do, bit for bit, whole and in parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meshtune.config import from_mapping
from meshtune.errors import LayoutError, ModelError
from meshtune.layout import Plan
from meshtune.layout.pieces import Cut, set_piece
from meshtune.models import hf
from meshtune.models.initialize import fill, initialize
from meshtune.models.quantization import bnb, choosing
from meshtune.models.quantization.ao import Integers
from meshtune.models.quantization.bnb import FourBit, Int8
from meshtune.models.quantization.choosing import choose, quantise
from meshtune.models.quantization.cuts import quantised_plan
from meshtune.models.quantization.linear import Codec, QuantizedLinear
from meshtune.models.quantization.loading import dequantised_state, put_quantised, quantised_layers
from meshtune.models.quantization.section import QuantizationSection
from meshtune.models.quantization.watching import weights_read
from meshtune.models.section import ModelSection
from meshtune.models.source import Source, resolve
from meshtune.parallel.stage_costs import cost
from tests.unit.models_tiny import save_tiny, saved_source, tiny_model, tiny_source
from tests.unit.test_models_load import _write_gguf as write_gguf

CPU = torch.device("cpu")
OUT, WIDTH = 96, 256
CODECS: list[Codec] = [
    FourBit("nf4", 64, True),
    FourBit("nf4", 32, False),
    FourBit("fp4", 64, True),
    Int8(),
    Integers(8, None),
    Integers(4, 64),
]
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def weight(dtype: torch.dtype = torch.float32, out: int = OUT, width: int = WIDTH) -> Tensor:
    return torch.randn((out, width), generator=torch.Generator().manual_seed(3)).to(dtype)


def layer_of(codec: Codec, whole: Tensor) -> QuantizedLinear:
    like = nn.Linear(whole.shape[1], whole.shape[0], bias=False, device="meta", dtype=whole.dtype)
    layer = QuantizedLinear(like, codec)
    put_quantised(layer, whole, CPU)
    return layer


def theirs(codec: Codec, whole: Tensor) -> nn.Module:
    """The library's own layer of the same weight."""
    import bitsandbytes
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    sizes = whole.shape[1], whole.shape[0]
    layer: Any
    if isinstance(codec, FourBit):
        settings: dict[str, Any] = {"quant_type": codec.kind, "compress_statistics": codec.double}
        layer = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, **settings)
        layer.weight = bitsandbytes.nn.Params4bit(whole.clone(), requires_grad=False, blocksize=codec.block, **settings)
        return layer.to("cpu")
    if isinstance(codec, Int8):
        layer = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(whole.clone(), requires_grad=False, has_fp16_weights=False)
        return layer.to("cpu").train()
    assert isinstance(codec, Integers)
    layer = nn.Sequential(nn.Linear(*sizes, bias=False))
    layer[0].weight.data = whole.float()
    of_width: Any = {
        8: lambda: Int8WeightOnlyConfig(set_inductor_config=False),
        4: lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(codec.block or 0)),
    }
    quantize_(layer, of_width[codec.width]())
    return layer


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{type(codec).__name__} {codec.name}")
def test_a_layer_computes_what_the_librarys_own_layer_does(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradient, from weights in float32 and in bfloat16; torchao's int8 multiplies before it scales. Ours is quantised
    seven rows at a time, theirs as a whole."""
    monkeypatch.setattr(bnb, "_AT_ONCE", 7 * WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        whole = weight(dtype)
        layer, wanted = layer_of(codec, whole), theirs(codec, whole)
        x = torch.randn((2, 5, WIDTH), generator=torch.Generator().manual_seed(5)).requires_grad_()
        found, right = layer(x), wanted(x)
        if codec == Integers(8, None):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-4)
            assert torch.equal(layer.dense(torch.float32), cast(Any, wanted)[0].weight.dequantize())
        else:
            assert torch.equal(found, right)
        gradient = torch.randn_like(found)
        (own,) = torch.autograd.grad(found, x, gradient)
        assert torch.equal(own, gradient @ layer.dense(torch.float32))
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), layer(x.bfloat16()))
    assert {p.is_floating_point() for p in layer.parameters()} == {False}, "mixed precision would round it"
    assert sum(p.numel() * p.element_size() for p in layer.parameters()) < 1.1 * OUT * WIDTH


def test_a_layer_is_compiled_whole() -> None:
    """No break in its graph, so that a block with such layers is one."""
    layer, x = layer_of(CODECS[0], weight()), torch.randn((2, WIDTH), requires_grad=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    found, right = compiled(x), layer(x)
    assert torch.equal(found, right)
    assert all(map(torch.equal, torch.autograd.grad(found.sum(), x), torch.autograd.grad(right.sum(), x)))


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    for kind, extra in (("nf4", "bitsandbytes"), ("int4", "torchao")):
        with pytest.raises(ModelError, match=rf"pip install 'meshtune\[{extra}\]'"):
            choose(hf.build(tiny_source("llama"), "eager"), from_mapping(QuantizationSection, {"type": kind}))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_part_that_is_cut_between_blocks_is_the_part_of_the_whole(codec: Codec) -> None:
    """Rows at any place, in stacked blocks too, and columns at whole blocks; three ranks get unequal parts."""
    whole = weight()
    dense = layer_of(codec, whole).dense(torch.float32)
    cuts = [Cut("tp", 0, (64, 32)), Cut("tp", 0, (OUT,), 5), Cut("tp", 1, (WIDTH,), 64), Cut("tp", -1, (128, 128), 64)]
    for cut, size in [(cut, size) for cut in cuts for size in (2, 3)]:
        for rank in range(size):
            layer = QuantizedLinear(nn.Linear(WIDTH, OUT, bias=False, device="meta"), codec)
            model = nn.ModuleDict({"layer": layer})
            layout: Any = SimpleNamespace(size=lambda axis, size=size: size)
            plan = quantised_plan(Plan(cuts={"layer.weight": cut}), model, layout)
            for name, own in plan.cuts.items():
                leaf = name.rpartition(".")[2]
                parameter = layer._parameters[leaf]
                assert parameter is not None
                piece = own.piece(tuple(parameter.shape), size, rank)
                layer._parameters[leaf] = nn.Parameter(torch.empty(piece.local_shape, dtype=parameter.dtype), False)
                set_piece(layer, leaf, piece)
            put_quantised(layer, whole, CPU)
            piece = cut.piece((OUT, WIDTH), size, rank)
            if 0 not in piece.local_shape:
                assert torch.equal(layer.dense(torch.float32), piece.of(dense)), (cut, size, rank)


def test_a_cut_inside_a_block_is_refused_by_name() -> None:
    model = nn.ModuleDict({"down": QuantizedLinear(nn.Linear(192, 8, device="meta"), FourBit("nf4", 64, True))})
    layout: Any = SimpleNamespace(size=lambda axis: 2)
    with pytest.raises(
        LayoutError, match=r"down \[8, 192\] .* 96 columns.* blocks of 64; write tp_size: 1, .*block_size: 32"
    ):
        quantised_plan(Plan(cuts={"down.weight": Cut("tp", 1, (192,))}), model, layout)


def build(source: Source, **section: Any) -> Any:
    model = hf.build(source, "eager")
    quantise(model, choose(model, QuantizationSection(**section)))
    return model


def held_by(model: nn.Module) -> dict[str, Tensor]:
    return {f"{path}.{name}": t for path, layer in quantised_layers(model).items() for name, t in layer.held.items()}


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2_moe", "hrm_text"])
def test_a_checkpoint_is_quantised_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    """Each weight as the library quantises it, whatever the checkpoint calls it or makes it of; all else as it was; what a model
    begins with at random, or is given by a caller, is quantised alike."""
    # The last one's checkpoint holds queries, keys, values and gates as one tensor, of which the values stay as they are.
    changes = SMALL | ({"shared_expert_intermediate_size": 64, "moe_intermediate_size": 64} if "moe" in name else {})
    source = saved_source(save_tiny(name, tmp_path, **changes))
    model = build(source, exclude_modules=["gate_proj"] if name == "hrm_text" else None)
    hf.load(model, source, CPU)
    plain = hf.build(source, "eager")
    hf.load(plain, source, CPU)
    layers = quantised_layers(model)
    assert len(layers) == {"llama": 14, "phi3": 8, "qwen2_moe": 14, "hrm_text": 12}[name]
    state = plain.state_dict()
    for path, layer in layers.items():
        wanted = FourBit("nf4", 64, True).quantise(state.pop(f"{path}.weight"))
        assert all(torch.equal(wanted[key], tensor) for key, tensor in layer.held.items()), path
    rest = {key: tensor for key, tensor in model.state_dict().items() if key not in held_by(model)}
    assert rest.keys() == state.keys()
    assert all(torch.equal(rest[key], tensor) for key, tensor in state.items())
    floats = dequantised_state(model, model.state_dict())
    assert {key: tuple(t.shape) for key, t in floats.items()} == {
        k: tuple(t.shape) for k, t in plain.state_dict().items()
    }

    filled, random, plainly_random = build(source), build(source), hf.build(source, "eager")
    initialize(filled, None, CPU)
    fill(filled, plain.state_dict())
    assert all(
        torch.equal(tensor, held_by(model)[key]) for key, tensor in held_by(filled).items() if key in held_by(model)
    )
    initialize(random, 7, CPU)
    initialize(plainly_random, 7, CPU)
    for path, layer in quantised_layers(random).items():
        wanted = FourBit("nf4", 64, True).quantise(plainly_random.get_submodule(path).weight.data)
        assert all(torch.equal(wanted[key], tensor) for key, tensor in layer.held.items()), path


def test_what_is_not_quantised_is_said() -> None:
    model = hf.build(tiny_source("qwen2_moe", **{**SMALL, "shared_expert_intermediate_size": 24}), "eager")
    chosen = choose(model, QuantizationSection(exclude_modules=["v_proj"]), trained=["layers.0.self_attn.o_proj"])
    assert not any(name.endswith(("gate", "v_proj")) for name in chosen.layers), "neither routers nor what is excluded"
    assert "model.layers.1.self_attn.o_proj" in chosen.layers
    lines = "\n".join(chosen.lines)
    for said in (
        "shared_expert.down_proj (2 of them) (0.0123 MB): its width 24 is no multiple of block_size 64",
        "model.layers.*.mlp.experts (2 of them) (0.0983 MB): stacked experts are not linear layers",
        "self_attn.v_proj (2 of them) (0.0164 MB): quantization.exclude_modules",
        "model.layers.*.self_attn.o_proj (0.0164 MB): peft.modules_to_save trains it",
        "shared_expert_gate (2 of them) (0.000512 MB): routers are not quantised",
        "embeddings, head",
    ):
        assert said in lines, f"{said} in\n{lines}"
    with pytest.raises(ModelError, match=r"exclude_modules: 'v_prj' matches no .*v_proj"):
        choose(model, QuantizationSection(exclude_modules=["v_prj"]))
    with pytest.raises(
        ModelError, match=r"no layer of GPT2LMHeadModel can be quantised .*c_attn.*Conv1D is no nn.Linear"
    ):
        choose(hf.build(tiny_source("gpt2"), "eager"), QuantizationSection())


def test_a_weight_that_the_models_code_reads_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_source("llama", **SMALL)
    assert weights_read(source) == frozenset()
    block = type(tiny_model("llama").model.layers[0].mlp)
    original = block.forward
    monkeypatch.setattr(block, "forward", lambda self, x: original(self, x.to(self.up_proj.weight.dtype)))
    other = tiny_source("llama", **SMALL, vocab_size=99)
    assert weights_read(other) == {"model.layers.*.mlp.up_proj"}
    chosen = choose(hf.build(other, "eager"), QuantizationSection(), read=weights_read(other))
    assert "model.layers.0.mlp.up_proj" not in chosen.layers
    assert "up_proj (2 of them) (0.0655 MB): the model's code reads its weight itself" in "\n".join(chosen.lines)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "nf4", "backend": "torchao"}, "torchao has no nf4 here; write bitsandbytes"),
        ({"type": "int8", "block_size": 64}, "block_size.*one scale for a row"),
        ({"type": "int8", "double_quant": True}, "double_quant.*belongs to `type: nf4`"),
        ({"type": "nf4", "block_size": 48}, "block_size.*32, 64, 128"),
        ({"load_in_4bit": True}, "type: nf4"),
    ],
)
def test_what_no_library_has_is_refused(values: dict[str, Any], message: str) -> None:
    from meshtune.errors import RecipeError

    with pytest.raises(RecipeError, match=message):
        from_mapping(QuantizationSection, values)


def test_a_pipeline_counts_the_weights_that_a_layer_stands_for() -> None:
    """Stages are as even as those of the float model: packed, a block would weigh half of what it costs beside the head."""
    source = tiny_source("llama", **SMALL)
    plain, model = hf.build(source, "eager"), build(source)
    assert cost(model) == cost(plain)
    assert cost(model.model.layers[0].mlp) == 3 * 64 * 128


def test_a_gguf_file_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    """Its matrices are permuted, and in forms of its own; what is made of each is quantised."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SMALL))
    source = resolve(ModelSection(name=str(tmp_path / "tiny.gguf")))
    model, plain = build(source), hf.build(source, "eager")
    hf.load(model, source, CPU)
    hf.load(plain, source, CPU)
    for path, layer in quantised_layers(model).items():
        wanted = FourBit("nf4", 64, True).quantise(plain.get_submodule(path).weight.data)
        assert all(torch.equal(wanted[key], tensor) for key, tensor in layer.held.items()), path
