"""Everything that can be known of a model before any weight is read: its config, class, files and tokenizer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.models.auto.auto_factory import _get_model_class

from meshtune.config.inside import inside
from meshtune.errors import ModelError
from meshtune.models import hub
from meshtune.models.headers import checkpoint_dtype, safetensors_header
from meshtune.models.quantization.section import QuantizationSection
from meshtune.models.quantization.stored import check_form
from meshtune.models.section import ModelSection

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """A model as its recipe names it, resolved but not loaded."""

    section: ModelSection
    location: str
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    files: list[str] = field(default_factory=list)
    gguf_file: str | None = None
    dtype: torch.dtype = torch.float32
    held: torch.dtype | None = None
    """What weights are held in, where not `master_dtype` decides."""

    @property
    def name(self) -> str:
        return self.section.name

    @property
    def export_dtype(self) -> torch.dtype:
        """The checkpoint's own dtype, unless the recipe names one."""
        return self.dtype if self.section.dtype == "auto" else getattr(torch, self.section.dtype)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype in which weights are held and updated."""
        if self.held is not None:
            return self.held
        return torch.float32 if self.section.dtype == "auto" else getattr(torch, self.section.dtype)

    def frozen(self, compute_dtype: torch.dtype, widens: bool) -> Source:
        """The same, its weights held in the checkpoint's own dtype, or the one that the recipe names, as befits what is not
        trained. Where weights do not `widen` to the compute dtype when they are used, float32 takes the place of another one."""
        dtype = self.export_dtype
        return replace(self, held=dtype if widens or dtype == compute_dtype else torch.float32)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the config declares, or None."""
        text_config = self.config.get_text_config(decoder=True)
        return getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)

    def facts(self) -> dict[str, Any]:
        """What a layout needs to know to say whether it fits."""
        text_config = self.config.get_text_config(decoder=True)
        return {
            "model_type": self.config.model_type,
            "num_attention_heads": getattr(text_config, "num_attention_heads", None),
            "num_hidden_layers": getattr(text_config, "num_hidden_layers", None),
        }


def resolve(section: ModelSection, quantization: QuantizationSection | None = None) -> Source:
    """Find config, class and weight files of `section`, and check each file's length against its own header.

    Raises ModelError: no such model, not a causal language model, a missing, truncated or unreadable file, weights that are
    quantised in a form that `quantization` does not name.
    """
    location, gguf_file = _locate(section)
    config = _config(section, location, gguf_file)
    _check_quantized(section, config, quantization)
    model_class, config = _model_class(section, location, config)
    files = [] if section.weights == "random" else weight_files(section, location, config, model_class, gguf_file)
    dtype = checkpoint_dtype(files) or getattr(config, "dtype", None) or torch.float32
    return Source(section, location, config, model_class, files, gguf_file, dtype)


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, with the tokens that the recipe adds. Raises ModelError if there is none."""
    tokenizer = _own_tokenizer(section)
    if section.add_tokens:
        known = tokenizer.get_vocab()
        if there := [token for token in section.add_tokens if token in known]:
            raise ModelError(
                f"model.add_tokens: the tokenizer has {', '.join(map(repr, there))} already; leave them out"
            )
        tokenizer.add_tokens(section.add_tokens)
    return tokenizer


def _own_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    location, gguf_file = _locate(section)
    extra = {"gguf_file": gguf_file} if gguf_file and not section.tokenizer else {}
    name = os.path.expanduser(section.tokenizer) if section.tokenizer else location
    try:
        return AutoTokenizer.from_pretrained(
            name,
            revision=section.revision if not section.tokenizer else None,
            trust_remote_code=section.trust_remote_code,
            local_files_only=hub.local_files_only(name),
            **extra,
        )
    except Exception as error:
        reason = hub.reason(name, error)
        raise ModelError(f"model.tokenizer: no tokenizer could be loaded from {name}: {reason}") from error


def _locate(section: ModelSection) -> tuple[str, str | None]:
    """A folder or hub id, and the GGUF file inside it if the name is one."""
    path = Path(section.name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model.name: there is no GGUF file {path}")
        return str(path.parent), path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model.name: folder {path} has no config.json; a Hugging Face model folder holds config.json, a tokenizer "
                "and *.safetensors"
            )
        return str(path), None
    looks_like_a_path = section.name.startswith((".", "/", "~")) or section.name.count("/") != 1 or path.is_file()
    if looks_like_a_path and ("/" in section.name or "\\" in section.name or path.is_file()):
        raise ModelError(f"model.name: there is no folder {section.name}; give a Hugging Face model folder or a hub id")
    return section.name, None


def _config(section: ModelSection, location: str, gguf_file: str | None) -> PreTrainedConfig:
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoConfig.from_pretrained(
            location,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            local_files_only=hub.local_files_only(location),
            **extra,
        )
    except Exception as error:
        reason = hub.reason(location, error)
        raise ModelError(f"model.name: no config could be read for {section.name}: {reason}") from error


def _check_quantized(section: ModelSection, config: PreTrainedConfig, wanted: QuantizationSection | None) -> None:
    found = getattr(config, "quantization_config", None)
    if found and not section.name.endswith(".gguf"):
        check_form(section.name, found if isinstance(found, dict) else found.to_dict(), wanted)


def _model_class(
    section: ModelSection, location: str, config: PreTrainedConfig
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    remote = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if remote and section.trust_remote_code:
        return get_class_from_dynamic_module(remote, location, revision=section.revision), config
    try:
        return causal_lm(config)
    except Exception as error:
        raise ModelError(
            f"model.name: {section.name} has model_type {config.model_type!r}, for which transformers has no causal language "
            "model"
        ) from error


def causal_lm(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class that transformers' AutoModelForCausalLM would build, and its config: of a composite that is only its text part
    where the class is a text model. Raises KeyError if there is none."""
    model_class = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    text_class = config.sub_configs.get("text_config", None)
    return model_class, config.get_text_config() if model_class.config_class == text_class else config


def weight_files(
    section: ModelSection,
    location: str,
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    gguf_file: str | None,
) -> list[str]:
    """Paths of every weight file, downloaded if `location` is a hub id, each checked."""
    explicit = getattr(config, "transformers_weights", None)
    if Path(location).is_dir() and gguf_file is None:
        _check_index(Path(location), explicit)
    try:
        files, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=location,
            variant=None,
            gguf_file=gguf_file,
            use_safetensors=None if gguf_file else True,
            user_agent=None,
            is_remote_code=section.trust_remote_code,
            transformers_explicit_filename=explicit,
            download_kwargs={"revision": section.revision, "local_files_only": hub.local_files_only(location)},
        )
    except Exception as error:
        raise ModelError(
            f"model.name: no safetensors weights could be found for {section.name}: {hub.reason(location, error)}; "
            "to start from random weights write `weights: random`"
        ) from error
    for file in files or []:
        if file.endswith(".safetensors"):
            safetensors_header(Path(file))
    return list(files or [])


def _check_index(folder: Path, explicit: str | None) -> None:
    """Of a folder whose weights lie in several files: each is in the folder, and is there."""
    sharded = explicit is not None and explicit.endswith(".index.json")
    index = folder / (explicit if explicit is not None and sharded else _INDEX)
    if not sharded and (explicit is not None or not index.is_file() or (folder / "model.safetensors").is_file()):
        _refuse_pickles(folder)
        return
    try:
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"model.name: {index} is not a safetensors index: {error}") from error
    try:
        files = [inside(folder, name) for name in wanted]
    except (ValueError, TypeError) as error:
        raise ModelError(f"model.name: {index}: {error}; only files of its own folder are read") from error
    absent = [name for name, file in zip(wanted, files, strict=True) if not file.is_file()]
    if absent:
        raise ModelError(
            f"model.name: {index} names {len(wanted)} files, of which these are missing: {', '.join(absent)}"
        )


def _refuse_pickles(folder: Path) -> None:
    """Weights of the older kind run what their file says when they are loaded."""
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.name: the weights of {folder} are pickles ({', '.join(pickles[:3])}), which are not read, since loading one "
            "can run anything; if you trust it, convert it: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(...)"
        )
