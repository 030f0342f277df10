"""A twin of a model: same architecture, random weights, small enough to run in moments.

What no declaration states is tried on it before any weight is read. A config that is small already is its own twin; of a
large one, the smallest cut that transformers can build and run is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ContextManagers

from meshtune.errors import ModelError
from meshtune.models.shrink import Cut, Degrees, Values, divisors, fine_cuts, shrink
from meshtune.models.source import Source

_SMALL_ENOUGH = 20_000_000
_MINIATURE = 300_000
_LARGEST = 150_000_000
_CUTS = (Cut(), Cut(layers=False), Cut(experts=False), Cut(layers=False, experts=False), Cut(vocabulary=False))

_REACH = re.compile(
    r"sliding_window(_size)?$|attention_(chunk|window)(_size)?$|^window_size$|^local_attention$|keep_window_size|window_len$"
    r"|^index_topk$"
)
_CHUNK = re.compile(r"^(mamba_)?chunk_size$")
_SHORT = 4
_SHORT_CHUNK = 8


def twin_config(source: Source) -> PreTrainedConfig:
    """The config of the smallest twin that runs. Raises ModelError with the reason if none does."""
    return _first_that_runs(source, _candidates, (_SMALL_ENOUGH, _LARGEST))


def miniature_config(source: Source, degrees: Degrees) -> PreTrainedConfig:
    """The config of a twin that trains in moments, made as small as `degrees` allow, head sizes too.

    Raises ModelError with the reason if none runs.
    """

    def candidates(source: Source) -> Iterator[Values]:
        whole = source.config.to_dict()
        if parameter_count(source, source.config) <= _MINIATURE:
            yield whole
            return
        for cut in fine_cuts(whole, degrees):
            yield shrink(whole, cut)
        yield from _candidates(source)

    return _first_that_runs(source, candidates, (_SMALL_ENOUGH, _LARGEST))


def _first_that_runs(
    source: Source, candidates: Callable[[Source], Iterator[Values]], limits: tuple[int, ...]
) -> PreTrainedConfig:
    try:
        found = list(candidates(source))
    except Exception as error:
        name = source.model_class.__name__
        raise ModelError(
            f"model.name: transformers cannot build {name} from this config ({one_line(error)})"
        ) from error
    reason = f"it has more than {_LARGEST:,} parameters however it is cut"
    for limit in limits:
        for values in found:
            try:
                config = type(source.config).from_dict(_telling(values))
                if parameter_count(source, config) > limit:
                    continue
                _run(build_twin(source, config, "eager", torch.device("cpu")))
                return config
            except Exception as error:
                reason = one_line(error)
    raise ModelError(f"no small twin of {source.model_class.__name__} could be built to try it on ({reason})")


def _candidates(source: Source) -> Iterator[Values]:
    whole = source.config.to_dict()
    if parameter_count(source, source.config) <= _SMALL_ENOUGH:
        yield whole
        return
    for cut in _CUTS:
        for divisor in divisors(whole):
            yield shrink(whole, Cut(divisor, cut.layers, cut.experts, cut.vocabulary))
    yield whole


def with_positions(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """The same config for sequences of at most `count` tokens."""

    def limit(values: Values) -> Values:
        return {
            name: limit(value)
            if isinstance(value, dict) and name.endswith("_config")
            else count
            if name in ("max_position_embeddings", "n_positions") and type(value) is int
            else value
            for name, value in values.items()
        }

    return type(config).from_dict(limit(config.to_dict()))


def _telling(values: Values) -> Values:
    """The same config, set so that what it does shows in a short row: windows that end inside it, soft-caps that cap; and no
    dropout, which would make two runs differ."""
    return {name: _telling_value(str(name), value) for name, value in values.items()}


def _telling_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _telling(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if _REACH.search(name):
        return min(value, _SHORT)
    if _CHUNK.search(name):
        return min(value, _SHORT_CHUNK)
    if "softcap" in name:
        return min(value, 1.0)
    if "dropout" in name or "jitter" in name or name.endswith(("pdrop", "layerdrop")):
        return type(value)(0)
    if name == "index_n_heads":
        return max(value, 16)  # with few, scores tie at zero, and which keys are taken is a matter of chance
    return value


def build_twin(
    source: Source, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of `config`, in eval mode; its weights depend on the config alone. No parameter has a special value (zero, one)
    that would hide what it does."""
    config = type(config).from_dict(config.to_dict())
    config.dtype = torch.float32
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = source.model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return model.to(device=device, dtype=dtype).eval()  # type: ignore[call-arg]


def row_of_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """[length] int64 of ordinary tokens: none that the config gives a meaning of its own, such as padding or an image."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    vocabulary = weight.shape[0]
    special = set(_token_ids(model.config.to_dict()))
    ordinary = torch.tensor([i for i in range(min(vocabulary, 4096)) if i not in special] or [0])
    choice = torch.randint(len(ordinary), (length,), generator=torch.Generator().manual_seed(0))
    return ordinary[choice]


def _token_ids(values: Values) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _token_ids(value)
        elif re.search(r"_(token_)?(id|ids|index)$", str(name)):
            yield from value if isinstance(value, list) else [value]


@torch.no_grad()
def _run(model: PreTrainedModel) -> None:
    logits = model(input_ids=row_of_tokens(model, 11)[None], use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise ValueError("its logits are not finite")


def parameter_count(source: Source, config: PreTrainedConfig) -> int:
    """Parameters of a model of `config`, which is built on meta."""
    config = type(config).from_dict(config.to_dict())
    with ContextManagers(source.model_class.get_init_context(torch.float32, False, False, None)):
        return sum(p.numel() for p in source.model_class(config).parameters())


def one_line(error: Exception) -> str:
    """Type and first line of an exception, cut to a readable length."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:240]
