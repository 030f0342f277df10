"""Small tokenizers and chat templates of the kinds that models have, for the tests of the data room."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "[TOOL_CALLS]", "[TOOL_RESULTS]",
]  # fmt: skip
CORPUS = [
    "hello there, how are you? I am fine. user assistant system model",
    "the answer is four: 2 + 2 = 4, or so they say, yes",
    '{"name": "f", "arguments": {"x": 1}} <think>\n\n</think>\n\n',
]

TEMPLATES = {
    # what most models have: a header, the text, a terminator and a line feed
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # trims, writes bos once
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # no generation prompt at all; the system text goes into the first user turn
    "mistral": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set sys = messages[0]['content'] %}"
        "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m['role'] == 'user' %}[INST] {{ (sys ~ '\n\n') if loop.first and sys else '' }}"
        "{{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # refuses system, calls the assistant model
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # strips reasoning of turns before the last user turn; writes an empty block into a last turn without
    "thinking": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
        "{% set why = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
        "if '</think>' in m.content else '' %}"
        "{% if loop.index0 > ns.last and (loop.last or why) %}<think>\n{{ why }}\n</think>\n\n{% endif %}"
        "{{ text }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # the generation prompt opens the reasoning that history does not show
    "open_think": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] "
        "if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    # markers for the assistant's part, as newer templates have
    "markers": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
        "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # no special token anywhere
    "plain": (
        "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}"
    ),
    # an extra end of sequence after the last turn's terminator
    "extra_eos": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
        "{% if loop.last and m['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # content must be a list of parts; a string shows nothing
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}{{ p['text'] }}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # knows some roles only and passes over the rest in silence
    "deaf": (
        "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] %}<|im_start|>"
        "{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # ChatML with tools; arguments are objects
    "tools": (
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
        '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # alternation is enforced, but for tool calls; nothing announces an assistant; arguments are strings
    "mistral_tools": (
        "{% set ns = namespace(i=0) %}{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
        "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% if m.role == 'user' %}[INST] "
        "{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}' }}"
        "{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
}


@cache
def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def byte_level(template: str | None = None, eos: str = "<|im_end|>", **kwargs: Any) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with one of the templates."""
    chat_template = TEMPLATES[template] if template else None
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level().to_str()),
        bos_token="<s>",
        eos_token=eos,
        pad_token="<pad>",
        chat_template=chat_template,
        **kwargs,
    )


def greedy_specials(template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose turn markers swallow the white space after them."""
    inner = Tokenizer.from_str(_byte_level().to_str())
    inner.add_special_tokens(
        [AddedToken(token, rstrip=True, special=True) for token in ("<|user|>", "<|assistant|>", "<|end|>")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=template)


def metaspace(template: str) -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like tokenizer: ▁ for spaces, one put before each piece of text."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{b:02X}>" for b in range(256))],
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[template]
    )


def words(template: str | None = None, eos: str = "<end>") -> PreTrainedTokenizerFast:
    """Return the toy tokenizer: <bos> 0, <u> 1, <a> 2, <s> 3, <end> 4, <eos> 5, <pad> 6, hi 7, ok 8."""
    tokens = ["<bos>", "<u>", "<a>", "<s>", "<end>", "<eos>", "<pad>", "hi", "ok", "<unk>"]
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token=eos, pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<u>", "<a>", "<s>", "<end>", "<eos>"]})
    tokenizer.chat_template = template or (
        "<bos>{% for m in messages %} {{ {'user': '<u>', 'assistant': '<a>', 'system': '<s>'}[m['role']] }}"
        " {{ m['content'] }} <end>{% endfor %}"
    )
    return tokenizer


def merging() -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer whose one merge is (`:`, `y`), and whose template writes `q:` + answer."""
    inner = Tokenizer(models.BPE({"q": 0, ":": 1, "y": 2, "e": 3, "s": 4, ":y": 5}, [(":", "y")]))
    template = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}:{% endif %}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)
