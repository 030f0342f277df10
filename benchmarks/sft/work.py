"""The work that every contender does: a random model, its tokenizer and chat template, and conversations."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

# With the generation markers that TRL's mask needs; meshtune derives the same mask without them.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant {% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %} {% else %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@dataclass(frozen=True)
class Work:
    """Sizes of the model, and of the rows. A step is `micro_batch` padded rows, or packs of about as many tokens.

    Lengths of rows are skewed as those of chats are: at `skew` 2 few come near the longest, half are below a third of it; at 1
    they are uniform, which leaves less to gain by packing.
    """

    hidden: int = 384
    layers: int = 8
    inner: int = 1024
    heads: int = 6
    kv_heads: int = 2
    vocabulary: int = 32_000
    rows: int = 2_000
    longest: int = 1024
    micro_batch: int = 4
    skew: int = 2
    seed: int = 0

    @property
    def packs(self) -> int:
        """Packs that hold about as many tokens as `micro_batch` rows."""
        return max(1, round(self.micro_batch / (self.skew + 1)))

    def make(self, folder: Path) -> None:
        """Write `folder/model` and `folder/train.jsonl`."""
        self._make_model(folder / "model")
        chooser = random.Random(self.seed)
        with (folder / "train.jsonl").open("w", encoding="utf-8") as out:
            for _ in range(self.rows):
                out.write(json.dumps({"messages": self._conversation(chooser)}) + "\n")

    def _make_model(self, folder: Path) -> None:
        import torch
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
        from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

        marks = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
        names = [*marks, "user", "assistant", *(f"w{i}" for i in range(self.vocabulary - len(marks) - 2))]
        backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>"
        )
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            tie_word_embeddings=True,
            max_position_embeddings=max(2048, self.longest),
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=2,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def _conversation(self, chooser: random.Random) -> list[dict[str, str]]:
        """1 to 3 exchanges; question and answer of an exchange are about equally long."""
        exchanges = chooser.randint(1, 3)
        room = self.longest // exchanges - 12
        messages = []
        for _ in range(exchanges):
            both = int(room * chooser.random() ** self.skew) + 8
            answer = max(2, int(both * chooser.uniform(0.45, 0.53)))
            for role, count in (("user", max(2, both - answer)), ("assistant", answer)):
                words = " ".join(f"w{chooser.randrange(self.vocabulary - 6)}" for _ in range(count))
                messages.append({"role": role, "content": words})
        return messages
