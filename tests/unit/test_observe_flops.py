"""Honest throughput (C27 of the wishes: right peak FLOPs), precision, memory and environment."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshtune.observe import (
    choose_precision,
    device_peak_flops,
    environment,
    mean_document_length,
    measure_matmul_flops,
    model_flops_utilization,
    peak_memory_bytes,
    training_flops_per_token,
)
from meshtune.observe import precision as precision_module
from meshtune.observe.devices import peak_of


def test_flops_of_a_token() -> None:
    """6 N + 6 f N_head + 6 L H Q T, on numbers that can be checked by hand."""
    assert training_flops_per_token(1000, 2, 16, 10.0) == 6 * 1000 + 6 * 2 * 16 * 10
    with_head = training_flops_per_token(1000, 2, 16, 10.0, head_parameters=500, supervised_fraction=0.5)
    assert with_head == 6 * 1000 + 6 * 250 + 6 * 2 * 16 * 10


def test_flops_agree_with_counted_matrix_products() -> None:
    """The causal share counts each of the (query, key) pairs of a document: l * l / 2 of them, for each
    document.
    """
    lengths, layers, size = [3, 5, 8], 2, 16
    tokens, pairs = sum(lengths), sum(length * length / 2 for length in lengths)
    # Scores and weighted sum, two operations each, three passes (forward, and two products backward).
    counted = layers * pairs * size * 2 * 2 * 3
    assert training_flops_per_token(0, layers, size, mean_document_length(lengths)) * tokens == counted


def test_the_mean_length_is_that_of_the_average_token() -> None:
    """One document of 100 tokens among 100 of one token: half of the tokens see 100, the mean is 50.5."""
    assert mean_document_length([100] + [1] * 100) == 50.5
    assert mean_document_length([]) == 0.0


def test_utilization() -> None:
    """A token counts once whatever the number of devices; an unknown peak gives no number rather than a wrong
    one.
    """
    assert model_flops_utilization(1e9, 1000.0, 1e12, 4) == 0.25
    assert model_flops_utilization(1e9, 1000.0, None, 4) is None


@pytest.mark.parametrize(
    ("name", "kind", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Some GPU 9000", "bf16", None),
    ],
)
def test_peak_of_known_devices(name: str, kind: str, teraflops: float | None) -> None:
    """Honest throughput: dense figures, by variant of a product; unknown devices and slices give None."""
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_of(name, kind) == expected


def test_fp32_means_tf32_where_torch_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of the arithmetic which really runs; other types and devices have none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert device_peak_flops("cuda:0", torch.float32) == 19.5e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device_peak_flops("cuda:0", torch.float32) == 156e12
    assert device_peak_flops("cuda:0", torch.bfloat16) == 312e12
    assert device_peak_flops("cuda:0", torch.float64) is None
    assert device_peak_flops("cpu", torch.float32) is None


def test_precision_is_measured_quickly_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 8: both are measured in well under a second, then never again in the process."""
    precision_module._measured.cache_clear()
    start = time.perf_counter()
    choice, flops = choose_precision("cpu")
    # Half a second on a quiet machine; others may be running here.
    assert time.perf_counter() - start < 3.0
    assert set(flops) == {"fp32", "bf16"} and flops["fp32"] > 0
    monkeypatch.setattr(precision_module, "measure_matmul_flops", None)
    assert choose_precision(torch.device("cpu")) == (choice, flops)


@pytest.mark.parametrize(
    ("bf16", "expected"), [(200e9, "bf16"), (101e9, "fp32"), (99e9, "fp32"), (0.2e9, "fp32"), (0.0, "fp32")]
)
def test_bf16_only_where_clearly_quicker(monkeypatch: pytest.MonkeyPatch, bf16: float, expected: str) -> None:
    """Promise 8: a device that emulates bf16, or is no quicker in it, gets fp32."""
    rates = {torch.float32: 100e9, torch.bfloat16: bf16}
    monkeypatch.setattr(precision_module, "measure_matmul_flops", lambda dtype, budget, device: rates[dtype])
    precision_module._measured.cache_clear()
    assert choose_precision("cpu") == (expected, {"fp32": 100e9, "bf16": bf16})
    precision_module._measured.cache_clear()


def test_a_slow_type_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 8: a device that needs 20 ms for the tiniest product is not asked for larger ones."""
    sizes: list[int] = []

    def slow(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(left.shape[0])
        time.sleep(0.02 * (left.shape[0] / 64) ** 3)

    monkeypatch.setattr(torch, "mm", slow)
    start = time.perf_counter()
    rate = measure_matmul_flops(torch.float32, 0.2)
    assert time.perf_counter() - start < 0.5
    assert set(sizes) == {64}
    assert rate == pytest.approx(2 * 64**3 / 0.02, rel=0.5)


def test_a_type_that_the_device_refuses_counts_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without bf16 gives fp32, not a crash."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not implemented for 'BFloat16'")

    monkeypatch.setattr(torch, "mm", refuse)
    assert measure_matmul_flops(torch.bfloat16, 0.1) == 0.0


def test_peak_memory_is_that_of_this_process() -> None:
    """In bytes; it grows with what is held and does not count what the parent process once held."""
    code = (
        "from meshtune.observe.memory import peak_memory_bytes as peak; before = peak('cpu');"
        "held = bytearray(b'x') * 80_000_000; print(before, peak('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    before, after = map(int, done.stdout.split())
    assert 2**22 < before < 150 * 2**20
    assert 70e6 < after - before < 100e6
    assert peak_memory_bytes(torch.device("cpu")) > 2**26


def test_peak_memory_of_an_accelerator_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA and ROCm the number is the device's, not the host's."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345)
    assert peak_memory_bytes("cuda:0") == 12345


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()


def test_environment_tells_versions_and_git_state(tmp_path: Path) -> None:
    """The run folder says what made it: JSON-ready, with the commit and whether files differ from it."""
    assert environment(tmp_path)["git"] is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1", encoding="utf-8")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    (tmp_path / "runs").write_text("untracked", encoding="utf-8")
    found = environment(tmp_path)
    assert found["git"] == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a.py").write_text("2", encoding="utf-8")
    assert environment(tmp_path)["git"]["dirty"] is True
    assert found["packages"]["torch"] == torch.__version__
    assert found["device"]["name"] and found["python"] and found["platform"] and found["command"]
    assert json.loads(json.dumps(found)) == found


def test_environment_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git still trains."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment(tmp_path)["git"] is None
