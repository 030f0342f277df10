"""Chat templates written anew in the shapes that real models have, each saying of itself what has to be learnt.

What stands between ⟪ and ⟫ is what a model has to produce: all after the generation prompt, to the terminator. A
tokenizer gets the template without these marks; `expected` renders it with them. So a template is its own oracle,
and the encoder never sees the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.unit import data_tokenizers as kit

OPEN, CLOSE = "⟪", "⟫"
_SPECIAL = re.compile(
    r"<\|[\w▁]+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>|</?s>|<turn\|>|<\|turn>|<\|\w+>|<\w+\|>"
)


@dataclass(frozen=True)
class Shape:
    """One template: its source with marks, the tokenizer's end of sequence, and what it can show."""

    source: str
    eos: str
    system: bool = True
    tools: bool = False
    calls: int = 2
    text_beside_calls: bool = True
    reasoning: bool = False
    trims: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a byte-level tokenizer with this template, unmarked, and its special tokens; the same each time."""
        return _tokenizer(self.source.replace(OPEN, "").replace(CLOSE, ""), self.eos)

    def expected(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> tuple[str, list[bool]]:
        """Return the rendered text, and for each of its characters whether it has to be learnt."""
        marked = self.tokenizer().apply_chat_template(messages, tools=tools, tokenize=False, chat_template=self.source)
        text, flags, inside = [], [], False
        for character in str(marked):
            if character in (OPEN, CLOSE):
                assert inside == (character == CLOSE), marked
                inside = not inside
            else:
                text.append(character)
                flags.append(inside)
        assert not inside
        return "".join(text), flags


@cache
def _tokenizer(template: str, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(kit.byte_level().backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token=eos,
        pad_token="<pad>",
        chat_template=template,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(_SPECIAL.findall(template)))})
    return tokenizer


_LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_THOUGHT = (
    "{%- set text = m.content or '' -%}{%- set why = m.reasoning_content or '' -%}"
    "{%- if not why and '</think>' in text -%}"
    "{%- set why = text.split('</think>')[0].split('<think>')[-1] -%}{%- set text = text.split('</think>')[-1] -%}"
    "{%- endif -%}{%- set why = why.strip() -%}{%- set text = text.lstrip('\\n') -%}"
)

SHAPES = {
    "qwen3": Shape(
        "{%- if tools -%}{{ '<|im_start|>system\\n' }}"
        "{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- endif -%}"
        "{{ '# Tools\\n<tools>' }}{%- for t in tools -%}{{ '\\n' }}{{ t | tojson }}{%- endfor -%}"
        "{{ '\\n</tools>\\nanswer with {\"name\": <name>, \"arguments\": <object>}<|im_end|>\\n' }}"
        "{%- elif messages[0].role == 'system' -%}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
        "{%- endif -%}" + _LAST_USER + "{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
        "{%- elif m.role == 'assistant' -%}" + _THOUGHT + "{{ '<|im_start|>assistant\\n⟪' }}"
        "{%- if loop.index0 > ns.last and (loop.last or why) -%}{{ '<think>\\n' + why + '\\n</think>\\n\\n' }}{%- endif -%}"
        "{{ text }}{%- for c in m.tool_calls or [] -%}{{ '\\n' if text or not loop.first }}"
        "{{ '<tool_call>\\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}"
        "{{ '}\\n</tool_call>' }}{%- endfor -%}{{ '<|im_end|>⟫\\n' }}"
        "{%- elif m.role == 'tool' -%}"
        "{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}"
        "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
        "<|im_end|>", tools=True, reasoning=True,
    ),
    "llama3.1": Shape(
        "{{- '<s>' }}{%- set rest = messages -%}{%- set system = '' -%}"
        "{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content | trim -%}"
        "{%- set rest = messages[1:] -%}{%- endif -%}"
        "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: 2023\\n\\n' + system + '<|eot_id|>' }}"
        "{%- if tools -%}{%- set first = rest[0].content | trim -%}{%- set rest = rest[1:] -%}"
        "{{ '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n' }}{%- for t in tools -%}{{ t | tojson(indent=4) }}"
        "{%- endfor -%}{{ '\\n\\n' + first + '<|eot_id|>' }}{%- endif -%}"
        "{%- for m in rest -%}{%- if m.role == 'tool' -%}"
        "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{ m.content | tojson }}{{ '<|eot_id|>' }}"
        "{%- elif m.tool_calls -%}{%- if m.tool_calls | length != 1 -%}{{ raise_exception('single tool-calls only') }}"
        "{%- endif -%}{%- set f = m.tool_calls[0].function -%}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n⟪{\"name\": \"' + f.name + '\", \"parameters\": ' }}"
        "{{ f.arguments | tojson }}{{ '}<|eot_id|>⟫' }}"
        "{%- else -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}{{ '⟪' if m.role == 'assistant' }}"
        "{{ m.content | trim }}{{ '<|eot_id|>' }}{{ '⟫' if m.role == 'assistant' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}",
        "<|eot_id|>", tools=True, calls=1, text_beside_calls=False, trims=True,
    ),
    # the tools stand before the last question, and alternation is enforced
    "mistral-v3": Shape(
        "{%- set ns = namespace(i=0) -%}{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}"
        "{{ '<s>' }}{%- for m in messages -%}"
        "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}"
        "{%- if (m.role == 'user') != (ns.i % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{%- set ns.i = ns.i + 1 -%}{%- endif -%}"
        "{%- if m.role == 'user' -%}{%- if tools and m == asked[-1] -%}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}"
        "{{ '[/AVAILABLE_TOOLS]' }}{%- endif -%}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS] {\"content\": ' }}{{ m.content | tojson }}{{ '}[/TOOL_RESULTS]' }}"
        "{%- elif m.tool_calls -%}{{ '⟪[TOOL_CALLS] [' }}{%- for c in m.tool_calls -%}{{ ', ' if not loop.first }}"
        "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}' }}"
        "{%- endfor -%}{{ ']</s>⟫' }}"
        "{%- elif m.role == 'assistant' -%}{{ '⟪ ' + m.content + '</s>⟫' }}"
        "{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}{%- endfor -%}",
        "</s>", system=False, tools=True, text_beside_calls=False,
    ),
    "mistral-v7": Shape(
        "{{- '<s>' }}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
        "{%- elif m.role == 'user' -%}{{ '[INST]' + m.content + '[/INST]' }}"
        "{%- elif m.role == 'assistant' -%}{{ '⟪' + m.content + '</s>⟫' }}"
        "{%- else -%}{{ raise_exception('Only user, system and assistant roles') }}{%- endif -%}{%- endfor -%}",
        "</s>",
    ),
    "llama2": Shape(
        "{%- set rest = messages -%}{%- set system = '' -%}{%- if messages[0].role == 'system' -%}"
        "{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- set rest = messages[1:] -%}"
        "{%- endif -%}{%- for m in rest -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{%- if m.role == 'user' -%}{{ '<s>[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
        "{%- else -%}{{ '⟪ ' + m.content.strip() + ' </s>⟫' }}{%- endif -%}{%- endfor -%}",
        "</s>", trims=True,
    ),
    "gemma2": Shape(
        "{{- '<s>' }}{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{{ raise_exception('System role not supported') }}{%- endif -%}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
        "{{ '⟪' if m.role == 'assistant' }}{{ m.content | trim }}{{ '<end_of_turn>' }}"
        "{{ '⟫' if m.role == 'assistant' }}{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        "<end_of_turn>", system=False, trims=True,
    ),
    # results stand inside the model's turn, and the answer after them goes on in it
    "gemma4": Shape(
        "{{- '<s>' }}{%- if tools -%}{{ '<|turn>system\\n' }}{{ tools | tojson }}{{ '<turn|>\\n' }}{%- endif -%}"
        "{%- for m in messages -%}{%- if m.role != 'tool' -%}"
        "{%- set goes_on = not loop.first and loop.previtem.role == 'tool' -%}"
        "{%- if not goes_on -%}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{%- endif -%}"
        "{%- if m.tool_calls -%}{{ '⟪' }}{%- for c in m.tool_calls -%}"
        "{{ '<|tool_call>call:' + c.function.name + '{' }}{{ c.function.arguments | tojson }}{{ '}<tool_call|>' }}"
        "{%- endfor -%}{{ '<|tool_response>⟫' }}{%- set at = namespace(first=true) -%}"
        "{%- for r in messages[loop.index:] -%}{%- if at.first and r.role == 'tool' -%}"
        "{{ 'response:{value:' + r.content + '}<tool_response|>' }}{%- elif r.role != 'tool' -%}"
        "{%- set at.first = false -%}{%- endif -%}{%- endfor -%}"
        "{%- else -%}{{ '⟪' if m.role == 'assistant' }}{{ m.content | trim }}{{ '<turn|>' }}"
        "{{ '⟫' if m.role == 'assistant' }}{{ '\\n' }}{%- endif -%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<|turn>model\\n' }}{%- endif -%}",
        "<turn|>", tools=True, text_beside_calls=False, trims=True,
    ),
    "phi3": Shape(
        "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' }}{{ '⟪' if m.role == 'assistant' }}{{ m.content + '<|end|>' }}"
        "{{ '⟫' if m.role == 'assistant' }}{{ '\\n' }}{%- endfor -%}"
        "{{ '<|assistant|>\\n' if add_generation_prompt else '</s>' }}",
        "</s>",
    ),
    "phi4": Shape(
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '<|im_sep|>' }}{{ '⟪' if m.role == 'assistant' }}"
        "{{ m.content + '<|im_end|>' }}{{ '⟫' if m.role == 'assistant' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_sep|>' }}{%- endif -%}",
        "<|im_end|>",
    ),
    # the generation prompt opens the reasoning that no turn of history shows; arguments are strings
    "deepseek-r1": Shape(
        "{{- '<s>' }}{%- for m in messages -%}{%- if m.role == 'system' -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}"
        "{%- elif m.role == 'assistant' -%}{%- set text = (m.content or '').split('</think>')[-1] -%}"
        "{{ '<｜Assistant｜>' if loop.first or loop.previtem.role != 'tool' }}{{ '⟪' + text }}"
        "{%- if m.tool_calls -%}{{ '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls -%}"
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}"
        "{{ c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{%- endfor -%}{{ '<｜tool▁calls▁end｜>' }}{%- endif -%}"
        "{{ '<｜end▁of▁sentence｜>⟫' }}"
        "{%- elif m.role == 'tool' -%}{{ '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' }}"
        "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
        "{{ '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}",
        "<｜end▁of▁sentence｜>", tools=True,
    ),
    # no terminator: the next header ends a turn
    "glm4": Shape(
        "{{- '<|gmask|><|sop|>' }}{%- if tools -%}{{ '<|system|>\\n# Tools' }}{%- for t in tools -%}{{ t | tojson }}"
        "{%- endfor -%}{%- endif -%}" + _LAST_USER + "{%- for m in messages -%}"
        "{%- if m.role == 'assistant' -%}" + _THOUGHT + "{{ '<|assistant|>⟪' }}"
        "{{ '\\n<think>' + (why if loop.index0 > ns.last else '') + '</think>' }}"
        "{{ '\\n' + text.strip() if text.strip() }}"
        "{%- for c in m.tool_calls or [] -%}{{ '\\n<tool_call>' + c.function.name }}"
        "{%- for k, v in c.function.arguments.items() -%}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v | tojson }}"
        "{{ '</arg_value>' }}{%- endfor -%}{{ '\\n</tool_call>' }}{%- endfor -%}{{ '⟫' }}"
        "{%- elif m.role == 'tool' -%}{{ '<|observation|>' if loop.previtem.role != 'tool' }}"
        "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{%- else -%}{{ '<|' + m.role + '|>\\n' + m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}",
        "<|endoftext|>", tools=True, reasoning=True, trims=True,
    ),
    "chatml": Shape(
        "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif -%}"
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}{{ '⟪' if m.role == 'assistant' }}{{ m.content }}"
        "{{ '<|im_end|>' }}{{ '⟫' if m.role == 'assistant' }}{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
        "<|im_end|>",
    ),
    "zephyr": Shape(
        "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' }}{{ '⟪' if m.role == 'assistant' }}{{ m.content + '</s>' }}"
        "{{ '⟫' if m.role == 'assistant' }}{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}",
        "</s>",
    ),
    # channels; the last turn ends in another token; a result without a call before it is refused
    "harmony": Shape(
        "{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}"
        "{%- if tools or messages[0].role == 'system' -%}{{ '<|start|>developer<|message|>' }}"
        "{{ messages[0].content if messages[0].role == 'system' }}{{ tools | tojson if tools }}{{ '<|end|>' }}{%- endif -%}"
        + _LAST_USER + "{%- set called = namespace(name='') -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{%- elif m.role == 'assistant' -%}{{ '<|start|>assistant⟪' }}"
        "{%- if m.reasoning_content and (loop.index0 > ns.last or loop.last) -%}"
        "{{ '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant' }}{%- endif -%}"
        "{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}{%- set called.name = f.name -%}"
        "{{ ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}{{ f.arguments | tojson }}{{ '<|call|>⟫' }}"
        "{%- else -%}{%- set called.name = '' -%}"
        "{{ '<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{{ '⟫' }}{%- endif -%}"
        "{%- elif m.role == 'tool' -%}{%- if not called.name -%}{{ raise_exception('no call before this result') }}"
        "{%- endif -%}{{ '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}"
        "{{ m.content | tojson }}{{ '<|end|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}",
        "<|return|>", tools=True, calls=1, text_beside_calls=False, reasoning=True,
    ),
    # two tokens end every turn, of which the second is the end of sequence
    "cohere2": Shape(
        "{{- '<s>' }}{%- for m in messages -%}{{ '<|START_OF_TURN_TOKEN|>' }}"
        "{%- if m.role == 'assistant' -%}{{ '<|CHATBOT_TOKEN|>⟪<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}"
        "{{ '<|END_OF_TURN_TOKEN|>⟫' }}"
        "{%- else -%}{{ '<|' + m.role | upper + '_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif -%}",
        "<|END_OF_TURN_TOKEN|>",
    ),
    # the prompt opens the reasoning; a turn without any closes it at once
    "nemotron": Shape(
        _LAST_USER + "{%- for m in messages -%}{{ '<|im_start|>' + (m.role if m.role != 'tool' else 'user') + '\\n' }}"
        "{%- if m.role == 'assistant' -%}" + _THOUGHT +
        "{%- if why and loop.index0 > ns.last -%}{{ '<think>\\n⟪' + why + '\\n</think>\\n' }}"
        "{%- else -%}{{ '<think>⟪</think>' + ('\\n' if why else '') }}{%- endif -%}{{ text + '<|im_end|>⟫\\n' }}"
        "{%- else -%}{{ m.content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}",
        "<|im_end|>", reasoning=True,
    ),
}  # fmt: skip
