"""`meshtune export` of runs that train an adapter: PEFT loads it and computes what the merged model does; C77, C79."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.cli.conftest import Said, write_recipe
from tests.cli.test_export import in_bf16, rewrite
from tests.parity.conversations import make_tokenizer
from tests.parity.models import save_model

Command = Callable[..., Said]
IDS = torch.randint(4, 90, (1, 9), generator=torch.Generator().manual_seed(3))
RATE = "training.learning_rate=0.05"


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.float().eval()(input_ids=IDS, use_cache=False).logits
    return found


def with_peft(base: Path, adapter: Path) -> PreTrainedModel:
    """What PEFT makes of an adapter's folder, in float32."""
    from peft import PeftModel

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter)  # type: ignore[return-value]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Up to 1e-5 of the largest."""
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", ["peft.r=4", "peft.rank_pattern={q_proj: 2}", "peft.use_rslora=true", "peft.use_dora=true"]),
        ("llama", ["peft.r=4", "peft.init_lora_weights=pissa", "peft.target_modules=[q_proj, down_proj]"]),
        ("qwen3", ["peft.r=4", "peft.target_modules=[q_proj, lm_head]", "peft.modules_to_save=[norm]"]),  # a tied head
        ("qwen3", ["peft.r=4", "peft.trainable_token_indices=[5, 9]"]),
        ("qwen3_moe", ["peft.r=4", "peft.target_modules=[q_proj]", "peft.target_parameters=[all-experts]"]),
    ],
)
def test_an_adapter_loads_in_peft_and_is_what_is_merged(
    meshtune: Command, recipe: Path, tmp_path: Path, architecture: str, settings: list[str]
) -> None:
    base = save_model(tmp_path / "model", architecture, make_tokenizer())
    said = meshtune("train", recipe, f"model.name={base}", RATE, *settings)
    assert said.code == 0, said.err
    run = tmp_path / "run"
    adapter = load_file(run / "export" / "adapter_model.safetensors")
    assert all(bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name)
    wanted = logits(with_peft(base, run / "export"))
    before = logits(AutoModelForCausalLM.from_pretrained(base))
    assert not torch.allclose(wanted, before, atol=1e-3), "or this shows nothing"
    assert_same(logits(AutoModelForCausalLM.from_pretrained(run / "export")), wanted)
    assert len(AutoTokenizer.from_pretrained(run / "export")) == len(make_tokenizer())

    said = meshtune("export", run, "--to", tmp_path / "adapter")
    assert said.code == 0 and "an adapter of" in said.out, said.err
    again = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert again.keys() == adapter.keys() and all(torch.equal(again[name], adapter[name]) for name in adapter)

    said = meshtune("export", run, "--to", tmp_path / "merged", "--merge", "--dtype", "float32")
    assert said.code == 0, said.err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same(logits(merged), wanted)


@pytest.fixture(scope="module")
def adapted(meshtune: Command, things: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with `model` beside it, whose weights are in bf16, and an adapter of three steps; do not change it."""
    folder = tmp_path_factory.mktemp("adapted")
    base = save_model(folder / "model", "llama", make_tokenizer())
    rewrite(base, in_bf16)
    said = meshtune("train", write_recipe(folder, things), f"model.name={base}", RATE, "peft.r=4", "peft.alpha=8")
    assert said.code == 0, said.err
    return folder / "run"


def test_a_merge_is_float_arithmetic_rounded_once(meshtune: Command, adapted: Path, tmp_path: Path) -> None:
    said = meshtune("export", adapted, "--to", tmp_path / "merged", "--merge")
    assert said.code == 0, said.err
    base, merged = (load_file(one / "model.safetensors") for one in (adapted.parent / "model", tmp_path / "merged"))
    adapter = load_file(adapted / "export" / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        first, second = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{m}.weight") for m in "AB")
        if first is not None and second is not None:
            weight = (weight.float() + 2.0 * (second @ first)).to(weight.dtype)
        assert merged[name].dtype == torch.bfloat16 and torch.equal(merged[name], weight), name
    record = json.loads((tmp_path / "merged" / "merged.json").read_text(encoding="utf-8"))
    assert record["adapters"] == [{"adapter": str(adapted / "checkpoints" / "step-3"), "weight": 1.0}]
    assert record["base"]["weights"] == "as the checkpoint has them" and record["changed"] > record["lost_to_rounding"]


def test_adapters_are_merged_in_order_and_by_weight(meshtune: Command, adapted: Path, tmp_path: Path) -> None:
    """The run's own, and then half of the same once more."""
    arguments = ["--merge", "--dtype", "float32", "--adapter", adapted / "export", "--weight", 1, "--weight", 0.5]
    said = meshtune("export", adapted, "--to", tmp_path / "more", *arguments)
    assert said.code == 0, said.err
    assert f"step-3, then {adapted / 'export'} (0.5 of it) into {adapted.parent / 'model'}" in said.out
    assert meshtune("export", adapted, "--to", tmp_path / "once", "--merge", "--dtype", "float32").code == 0
    base = load_file(adapted.parent / "model" / "model.safetensors")
    once, more = (load_file(tmp_path / one / "model.safetensors") for one in ("once", "more"))
    for name, weight in base.items():
        change = once[name] - weight.float()
        torch.testing.assert_close(more[name], weight.float() + 1.5 * change, rtol=1e-5, atol=1e-5)


def test_a_run_goes_on_from_an_adapter(meshtune: Command, adapted: Path, things: Path, tmp_path: Path) -> None:
    """At a learning rate of zero it comes out as it went in."""
    recipe = write_recipe(tmp_path, things)
    start = (f"model.name={adapted.parent / 'model'}", f"peft.adapter={adapted / 'export'}")
    said = meshtune("train", recipe, *start, "training.learning_rate=0")
    assert said.code == 0, said.err
    before, after = (load_file(one / "export" / "adapter_model.safetensors") for one in (adapted, tmp_path / "run"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    said = meshtune("train", recipe, *start, "peft.r=4")
    assert said.code == 2 and "peft.r: is what" in said.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--adapter", "x"], "--adapter has no effect without --merge"),
        (["--merge", "--weight", 1, "--weight", 1], "--weight: 2 given for 1 adapters"),
        (["--merge", "--weight", "nan"], "--weight: found nan; wanted a finite number"),
        (["--merge", "--base", "original"], "--base original: the run's weights were not quantised"),
        (["--merge", "--adapter", "no/such/folder"], "--adapter: there is no adapter no/such/folder"),
    ],
)
def test_what_cannot_be_merged(
    meshtune: Command, adapted: Path, tmp_path: Path, arguments: list[Any], says: str
) -> None:
    said = meshtune("export", adapted, "--to", tmp_path / "out", *arguments)
    assert said.code == 2 and says in said.err
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_is_read_is_not_written_over(
    meshtune: Command, adapted: Path, things: Path, tmp_path: Path
) -> None:
    """Neither one that is merged, nor the one that a run went on from."""
    own = shutil.copytree(adapted / "export", tmp_path / "own")
    said = meshtune("export", adapted, "--to", own, "--merge", "--adapter", own)
    assert said.code == 2 and f"--to {own} is the adapter that --adapter names" in said.err, said.err
    start = (f"model.name={adapted.parent / 'model'}", f"peft.adapter={own}")
    assert meshtune("train", write_recipe(tmp_path, things), *start).code == 0
    said = meshtune("export", tmp_path / "run", "--to", own)
    assert said.code == 2 and f"--to {own} is the adapter that the run started from" in said.err, said.err
    assert (own / "adapter_model.safetensors").is_file()


def test_an_adapter_that_does_nothing_is_named_when_it_is_exported(
    meshtune: Command, recipe: Path, tmp_path: Path
) -> None:
    """C77: it loads everywhere, and looks like one that was trained."""
    settings = ["training.learning_rate=0", "training.max_steps=1", "peft.target_modules=[layers.1.self_attn.q_proj]"]
    assert meshtune("train", recipe, "checkpoint.export=none", *settings).code == 0
    said = meshtune("export", tmp_path / "run", "--to", tmp_path / "out")
    assert said.code == 0, said.err
    assert "the adapter of 1 layers does nothing: it is zero, as it began (model.layers.1.self_attn.q_proj)" in said.out


def test_an_adapter_is_merged_into_what_a_run_without_one_has_trained(
    meshtune: Command, adapted: Path, recipe: Path, tmp_path: Path
) -> None:
    assert meshtune("train", recipe, "checkpoint.export_dtype=float32").code == 0
    said = meshtune("export", tmp_path / "run", "--to", tmp_path / "out", "--merge")
    assert said.code == 2 and "--merge: the run has trained no adapter" in said.err
    said = meshtune("export", tmp_path / "run", "--to", tmp_path / "out", "--merge", "--adapter", adapted / "export")
    assert said.code == 0 and "whose weights are as trained" in said.out, said.err
    name = "model.layers.1.self_attn.q_proj"
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path / "run" / "export", tmp_path / "out"))
    adapter = load_file(adapted / "export" / "adapter_model.safetensors")
    first, second = (adapter[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    assert torch.equal(after[f"{name}.weight"], before[f"{name}.weight"] + 2.0 * (second @ first))


def test_weights_that_have_changed_since_are_not_merged_into(meshtune: Command, adapted: Path, tmp_path: Path) -> None:
    model = adapted.parent / "model"
    kept = shutil.copytree(model, tmp_path / "kept")
    try:
        rewrite(model, lambda _: torch.float32)
        said = meshtune("export", adapted, "--to", tmp_path / "out", "--merge")
        assert said.code == 2 and "holds an adapter beside other weights" in said.err
    finally:
        shutil.rmtree(model)
        shutil.copytree(kept, model)


def test_quantised_weights_are_merged_into_as_they_were_in_training_or_as_they_were_before(
    meshtune: Command, things: Path, tmp_path: Path
) -> None:
    """C79: what is merged into is said, printed and written down."""
    recipe = write_recipe(tmp_path, things)
    settings = ["quantization.block_size=32", "peft.r=4", "peft.target_modules=[q_proj]"]
    said = meshtune("train", recipe, RATE, *settings)
    assert said.code == 0, said.err
    for base in ("quantized", "original"):
        said = meshtune("export", tmp_path / "run", "--to", tmp_path / base, "--merge", "--base", base)
        assert said.code == 0, said.err
        record = json.loads((tmp_path / base / "merged.json").read_text(encoding="utf-8"))
        assert record["base"]["weights"] in said.out
        assert ("nf4" in record["base"]["weights"]) == (base == "quantized")
    stored = load_file(things / "model" / "model.safetensors")
    adapter = load_file(tmp_path / "run" / "export" / "adapter_model.safetensors")
    for base in ("quantized", "original"):
        merged = load_file(tmp_path / base / "model.safetensors")
        for name, weight in stored.items():
            is_held = name.endswith("_proj.weight") and base == "quantized" and weight.shape[1] % 32 == 0
            held = nf4(weight, 32) if is_held else weight
            path = f"base_model.model.{name.removesuffix('.weight')}"
            if name.endswith("q_proj.weight"):
                held = held + 8.0 * (adapter[f"{path}.lora_B.weight"] @ adapter[f"{path}.lora_A.weight"])
            assert torch.equal(merged[name], held), name


def nf4(weight: Tensor, block: int) -> Tensor:
    """What bitsandbytes makes of a weight and back."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    held, state = quantize_4bit(weight, blocksize=block, compress_statistics=True, quant_type="nf4")
    return dequantize_4bit(held, state)
