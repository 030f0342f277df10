"""Conversations of unequal length, the tokenizer that reads them, and an independent rendering of both."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<user>", "<assistant>", "<end>")
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

Message = tuple[str, str]


@dataclass(frozen=True)
class Row:
    """Token ids, and which of them are learnt: an assistant's text with its terminator."""

    ids: list[int]
    supervised: list[bool]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and four special ones; 260 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=_TEMPLATE,
    )


def make_conversations(count: int, seed: int, longest_text: int = 5) -> list[list[Message]]:
    """One or two exchanges each, of texts of 1 to `longest_text` letters."""
    source = random.Random(seed)

    def text() -> str:
        return "".join(source.choices(_LETTERS, k=source.randint(1, longest_text)))

    roles = ("user", "assistant")
    return [[(role, text()) for _ in range(source.randint(1, 2)) for role in roles] for _ in range(count)]


def write_jsonl(path: Path, conversations: list[list[Message]]) -> Path:
    """The conversations as OpenAI messages, one row a line."""
    with path.open("w", encoding="utf-8") as stream:
        for conversation in conversations:
            messages = [{"role": role, "content": content} for role, content in conversation]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return path


def render(conversation: list[Message]) -> Row:
    """What the template and the tokenizer make of a conversation, written out by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids: list[int] = []
    supervised: list[bool] = []
    for role, content in conversation:
        text = [len(_SPECIAL) + alphabet.index(letter) for letter in content]
        ids += [_SPECIAL.index(f"<{role}>"), *text, _SPECIAL.index("<end>")]
        supervised += [False, *([role == "assistant"] * (len(text) + 1))]
    return Row(ids, supervised)
