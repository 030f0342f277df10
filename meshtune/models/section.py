"""`model:`, which model to train and in what form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from meshtune.config import Section
from meshtune.config.patterns import unreadable


class ModelSection(Section):
    """A causal language model of transformers, by hub id or folder."""

    name: str = Field(
        description="Hub id, or a folder with config.json, tokenizer and safetensors, or a `.gguf` file in a folder."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    tokenizer: str | None = Field(
        None, description="Hub id or folder of the tokenizer, where it is not beside the model."
    )
    add_tokens: list[str] | None = Field(
        None,
        description="Tokens that the tokenizer gets beside its own, for rows that the embedding has to spare. They are exported "
        "with it.",
    )
    weights: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="`pretrained` loads the checkpoint; `random` initialises from the config alone, "
        "equal for every layout for one seed.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="`auto`: float32 master weights, exported in the checkpoint's own dtype. A named dtype is what the weights "
        "are held, trained and exported in; below float32 small updates are lost to rounding, and a warning says so.",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        "auto", description="Attention implementation. What `auto` chose is printed and stored."
    )
    trainable: str | list[str] | None = Field(
        None,
        description="What is trained, all else frozen: ends of names of modules or parameters, cut at dots, `*` for anything; or "
        "one regular expression over the whole name of a parameter. Default: everything.",
    )
    freeze: str | list[str] | None = Field(
        None,
        description="What is not trained, named in the same way; taken from what `trainable` names, or from everything.",
    )
    trust_remote_code: bool = Field(
        False, description="Run the Python code that a hub repository ships with its model."
    )
    allow_unexpected: list[str] = Field(
        default_factory=list,
        description="Regular expressions of checkpoint tensors that the model does not use and that may be left out. "
        "Any other unexpected tensor is an error.",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.weights == "random" and self.allow_unexpected:
            yield "allow_unexpected", "has no effect with `weights: random`, which reads no checkpoint"
        if self.weights == "random" and self.name.endswith(".gguf"):
            yield "name", "a GGUF file carries weights; `weights: random` needs a folder or hub id with a config.json"
        for key in ("trainable", "freeze"):
            patterns = getattr(self, key)
            if patterns is not None and (wrong := unreadable(patterns)):
                yield key, wrong
