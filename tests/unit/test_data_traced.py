"""Ways through chat templates: what is put together is what rendering gives, or nothing is."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any

import pytest

from meshtune.data.environments import compiled, traceable
from meshtune.data.formats import Message
from meshtune.data.traced import Ways
from tests.unit.chat_shapes import SHAPES

VALUES = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "add_generation_prompt": False}
LOOP = "{% for message in messages %}<{{ message.role }}>DOES\n{% endfor %}"


class Rendering:
    """A template beside its ways: `text` is what is put together, checked against rendering."""

    def __init__(self, source: str, **values: Any) -> None:
        self.template, self.probed, self.ways = compiled(source), traceable(source), Ways()
        self.values, self.used = {**VALUES, **values}, 0

    def text(self, messages: list[Message]) -> None:
        try:
            rendered = self.template.render(messages=messages, **self.values)
        except Exception:
            assert self.ways.text(messages) is None
            return
        made = self.ways.text(messages)
        assert made in (None, rendered)
        self.used += made is not None
        if made is None and self.probed is not None:
            self.ways.learn(messages, rendered, lambda m: self.probed.render(messages=m, **self.values))


def conversations(source: str, count: int = 150) -> list[list[Message]]:
    """Contents that the template may treat in another way: made of its own strings, white space, quotes."""
    rng = random.Random(0)
    own = sorted(set(re.findall(r"'([^']+)'|\"([^\"]+)\"", source)))
    words = [a or b for a, b in own] + ["yes", "no", " ", "\n", "é🙂", "'", '"', "<b>", "", "7", "Hello world"]

    def said() -> str:
        plain = rng.random() < 0.5
        return " ".join(rng.choice(words[-3:] if plain else words) for _ in range(rng.choice([1, 2, 5])))

    def one() -> list[Message]:
        messages = [{"role": ("user", "assistant")[i % 2], "content": said()} for i in range(2 * rng.randint(1, 3))]
        return ([{"role": "system", "content": said()}] if rng.random() < 0.3 else []) + messages

    return [one() for _ in range(count)]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_ways_give_the_text_of_the_template(name: str) -> None:
    source = SHAPES[name].source
    one = Rendering(source)
    for messages in conversations(source):
        one.text(messages)
    assert (one.used > 40) == (one.probed is not None and one.ways._traceable)


def test_most_templates_can_be_followed() -> None:
    followed = [name for name, shape in SHAPES.items() if traceable(shape.source) is not None]
    assert len(followed) >= len(SHAPES) / 2, followed


@pytest.mark.parametrize(
    "does",
    [
        "{{ message.content }}",
        "{{ message['content'] | trim }}",
        "{{ message.content.strip('\n') + '!' }}",
        "{{ '[' ~ message.content ~ ']' }}",
        "{% if message.content %}{{ message.content }}{% else %}-{% endif %}",
        "{% if message.content == 'yes' %}right{% else %}{{ message.content }}{% endif %}",
        "{% if message.content is string %}{{ message.content }}{% endif %}",
        "{% if '</think>' in message.content %}{{ message.content.split('</think>')[-1].lstrip() }}{% endif %}",
        "{% if message.content.startswith('yes') and not loop.first %}{{ message.content[1:] }}{% endif %}",
        "{% set text = message.content or 'nothing' %}{{ text | upper }}",
        "{% set ns = namespace(all='') %}{% set ns.all = ns.all + message.content + '\n' %}{{ ns.all }}",
        "{{ message.content.replace('yes', 'no').count('no') }}",
        "{{ message.content | default('x', true) }}",
    ],
)
def test_what_can_be_followed(does: str) -> None:
    source = LOOP.replace("DOES", does)
    one = Rendering(source)
    for messages in conversations(source + "'</think>' 'yes'"):
        one.text(messages)
    assert one.used > 40


@pytest.mark.parametrize(
    "does",
    [
        "{{ message | tojson }}",
        "{{ message.content | tojson }}",
        "{{ message.content | e }}",
        "{{ message.content | length }}",
        "{% if message.content | length > 12 %}long{% endif %}",
        "{% if message.content | wordcount > 1 %}long{% endif %}",
        "{% if message.content is lower %}low{% endif %}",
        "{% if message.content is in 'yes no' %}low{% endif %}",
        "{% if message.content in 'yes no' %}low{% endif %}",
        "{{ message.content | int }}",
        "{{ message.content | replace('yes', 'no') }}",
        "{{ message.content | title }}",
        "{{ message.content | first }}",
        "{{ message.content[0] }}",
        "{% if message.content[-1] == 'o' %}o{% endif %}",
        "{% set both = message.content ~ 'x' %}{{ both.count('e') }}",
        "{% set both = message.content + 'x' %}{{ both | trim }}{% if 'yes' in both %}!{% endif %}",
        "{% set both = [message.content, 'x'] | join %}{{ both | upper }}",
        "{% set both %}{{ message.content }}{% endset %}{{ both | upper }}",
        "{% set both = '%s' % message.content %}{{ both | upper }}",
        "{% set both = '%s' % (message.content,) %}{{ both | upper }}",
        "{{ 'yes Hello world'.count(message.content) }}",
        "{{ 'yes'.startswith(message.content) }}",
        "{{ message.content * 2 }}",
        "{% for letter in message.content %}{{ letter }}.{% endfor %}",
        "{% if message.content > 'm' %}late{% endif %}",
        "{% if {message.content: 1} %}{% endif %}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(message.content) | upper }}",
        "{% filter upper %}{{ message.content }}{% endfilter %}",
        "{{ messages | map(attribute='content') | join('|') | upper }}",
        "{{ messages | map(attribute='content') | map('length') | sum }}",
        "{{ messages | sort(attribute='content') | length }}",
        "{{ '{}'.format(message.content) | upper }}",
        "{{ message.content.format(7) }}",
        "{{ message.content.split('e') | join('E') }}",
    ],
)
def test_what_cannot_be_followed_is_rendered(does: str) -> None:
    source = LOOP.replace("DOES", does)
    one = Rendering(source)
    for messages in conversations(source + "'yes'"):
        one.text(messages)
    assert not one.used


def test_messages_are_compared_as_they_are() -> None:
    """Two messages with the same role differ by their contents."""
    source = "{% for m in messages %}{% if m == messages[-1] %}last: {% endif %}{{ m.content }}{% endfor %}"
    one = Rendering(source)
    for messages in conversations(source):
        one.text(messages)


def test_ways_travel_to_worker_processes() -> None:
    source = SHAPES["chatml"].source
    one = Rendering(source)
    for messages in conversations(source, 40):
        one.text(messages)
    again = pickle.loads(pickle.dumps(one.ways))
    assert [again.text(m) for m in conversations(source)] == [one.ways.text(m) for m in conversations(source)]
