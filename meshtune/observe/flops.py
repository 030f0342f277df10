"""How much arithmetic a training step needs, and how much the device could do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshtune.observe.devices import peak_of

if TYPE_CHECKING:
    import torch


def training_flops_per_token(
    num_parameters: int,
    num_layers: int,
    attention_size: int,
    mean_document_length: float,
    head_parameters: int = 0,
    supervised_fraction: float = 1.0,
    frozen_parameters: int = 0,
    frozen_head_parameters: int = 0,
) -> float:
    """Floating point operations that forward and backward need for one token.

    Model FLOPs of PaLM (Chowdhery et al. 2022, appendix B), `6 N + 12 L H Q T`, with two refinements.
    Attention is causal, so a token sees half of its document on average: `6 L H Q T`. And the head runs on
    supervised positions only: `6 N + 6 f N_head + 6 L H Q T`. Recomputed activations are not counted, nor are
    embedding look-ups.

    Args:
        num_parameters: N, those used for each token (of a mixture of experts, the active ones), without
            embeddings and head.
        num_layers: L.
        attention_size: H * Q, the number of heads times the size of one head; often the hidden size.
        mean_document_length: T in tokens, as a token sees it: `mean_document_length(lengths)`.
        head_parameters: N_head, also of a head that shares its weight with the embedding.
        supervised_fraction: f, supervised tokens divided by tokens, 0 to 1.
        frozen_parameters: those of N that get no gradient, which saves a third of their arithmetic.
        frozen_head_parameters: likewise of N_head.
    """
    weights = 6.0 * (num_parameters + supervised_fraction * head_parameters)
    weights -= 2.0 * (frozen_parameters + supervised_fraction * frozen_head_parameters)
    return weights + 6.0 * num_layers * attention_size * mean_document_length


def mean_document_length(lengths: Iterable[int]) -> float:
    """The length of the document in which the average token stands: `sum(l * l) / sum(l)`; 0 for no token.

    Attention costs `l` operations for each of `l` tokens, so the plain mean would understate it.
    """
    tokens = squares = 0
    for length in lengths:
        tokens += length
        squares += length * length
    return squares / tokens if tokens else 0.0


def model_flops_utilization(
    flops_per_token: float, tokens_per_second: float, peak_flops: float | None, num_devices: int
) -> float | None:
    """MFU, 0 to 1: the arithmetic that the model needed against what `num_devices` can do; None for an
    unknown peak.

    `tokens_per_second` counts each token of the global batch once, however many ranks share its computation;
    `num_devices` counts all of them.
    """
    if not peak_flops or num_devices < 1:
        return None
    return flops_per_token * tokens_per_second / (peak_flops * num_devices)


def device_peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Dense matrix FLOP/s that the maker states for a CUDA or ROCm device; None where unknown.

    float32 means TF32 where `torch.get_float32_matmul_precision()` allows it. For a CPU see
    `choose_precision`."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype)
    if kind is None:
        return None
    name = torch.cuda.get_device_name(device)
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return peak_of(name, "tf32") or peak_of(name, "fp32")
    return peak_of(name, kind)
