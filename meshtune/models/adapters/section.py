"""`peft:`, what is trained beside a frozen model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from meshtune.config import Section

# What an adapter's own files say: with `peft.adapter` these are read there.
_SHAPE = (
    "r",
    "alpha",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "trainable_token_indices",
)
R, ALPHA, TARGET_MODULES = 16, 32.0, "all-linear"


class AdapterSection(Section):
    """An adapter: the model stays frozen, and small matrices beside its layers are trained, in PEFT's own form. The keys are
    those of PEFT's LoraConfig, without the prefix `lora_`."""

    foreign: ClassVar[dict[str, str]] = {
        "lora_r": "r",
        "lora_rank": "r",
        "rank": "r",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "lora_target_modules": "target_modules",
        "lora_target": "target_modules",
        "lora_target_linear": "target_modules: all-linear",
        "lora_target_parameters": "target_parameters",
        "lora_modules_to_save": "modules_to_save",
        "additional_target": "modules_to_save",
        "rslora": "use_rslora",
        "dora": "use_dora",
        "init": "init_lora_weights",
        "trainable_tokens": "trainable_token_indices",
        "lr_ratio": "loraplus_lr_ratio",
        "lr_embedding": "loraplus_lr_embedding",
        "lora_model_dir": "adapter",
        "adapter_name_or_path": "adapter",
        "peft_type": "type",
    }

    type: Literal["lora"] = Field("lora", description="The kind of adapter.")
    r: int | None = Field(None, ge=1, description=f"Rank of the two matrices. Default {R}.")
    alpha: float | None = Field(
        None,
        gt=0,
        description=f"Their product counts alpha / r times (alpha / sqrt(r) with `use_rslora`). Default {ALPHA:.0f}.",
    )
    dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Probability of dropping an input of an adapter while training. Default 0; of an `adapter`, its own.",
    )
    target_modules: str | list[str] | None = Field(
        None,
        description="Layers that get an adapter. `all-linear`: every linear layer but the head (no router, no stacked experts). "
        "A list of ends of names (`q_proj`, `self_attn.q_proj`), in which `*` stands for any text; an empty list: none. Other "
        f"text is a regular expression over the whole name. Default `{TARGET_MODULES}`.",
    )
    exclude_modules: str | list[str] | None = Field(
        None, description="Which of them get none, written as `target_modules`."
    )
    target_parameters: list[str] | None = Field(
        None,
        description="Stacked weights of experts that get adapters, as ends of their names (`mlp.experts.down_proj`), or "
        "`all-experts`.",
    )
    modules_to_save: list[str] | None = Field(
        None, description="Modules that are trained whole beside the adapter and saved with it, as ends of their names."
    )
    rank_pattern: dict[str, int] | None = Field(
        None, description="Other ranks, by regular expressions over ends of layers' names."
    )
    alpha_pattern: dict[str, float] | None = Field(None, description="Other alphas, likewise.")
    use_rslora: bool | None = Field(None, description="Scale by alpha / sqrt(r). Default false.")
    use_dora: bool | None = Field(
        None, description="Learn each output's magnitude apart from its direction (DoRA). Default false."
    )
    init_lora_weights: str | None = Field(
        None,
        pattern=r"^(default|gaussian|pissa|pissa_niter_[1-9][0-9]*|olora)$",
        description="How the matrices begin: `default` (A random, B zero), `gaussian`, or from the weights themselves by "
        "`pissa`, `pissa_niter_N` or `olora`, which leave the rest as the frozen weight. Default `default`.",
    )
    trainable_token_indices: list[int | str] | None = Field(
        None, description="Tokens, by id or by text, whose rows of the embedding are trained."
    )
    loraplus_lr_ratio: float | None = Field(
        None, gt=0, description="LoRA+: so many times the learning rate for the second matrix (B)."
    )
    loraplus_lr_embedding: float | None = Field(
        None, gt=0, description="LoRA+: learning rate of adapters of the embedding. Default 1e-6."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What adapters are held and trained in. The frozen weights keep the checkpoint's dtype."
    )
    adapter: str | None = Field(
        None,
        description="Folder or hub id of an adapter in PEFT's form to go on from. Its own files say its shape.",
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.adapter is not None:
            for key in _SHAPE:
                if getattr(self, key) is not None:
                    yield key, f"is what {self.adapter} says; leave it out beside peft.adapter"
        for key in ("rank_pattern", "alpha_pattern"):
            for name, value in (getattr(self, key) or {}).items():
                if value <= 0:
                    yield key, f"{name}: found {value}; wanted a number above 0"
        if self.loraplus_lr_embedding is not None and self.loraplus_lr_ratio is None:
            yield "loraplus_lr_embedding", "has no effect without loraplus_lr_ratio"
        if self.target_parameters:
            if self.use_dora:
                yield (
                    "use_dora",
                    "is not defined for experts' stacked weights; leave target_parameters out, or use_dora",
                )
            if self.dropout:
                yield "dropout", "is not defined for experts' stacked weights; leave target_parameters out, or dropout"
