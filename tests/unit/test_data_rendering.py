"""Plain conversations rendered by the compiled template alone: the same text, or the long way."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from meshtune.data import rendering
from meshtune.data.formats import Message
from meshtune.data.rows import UnusableRow
from meshtune.data.template import ChatTemplate
from tests.unit.chat_shapes import SHAPES

WORDS = ["yes", "no\n", " four", "é🙂", "<think>", "</think>", "{{ x }}", "", "user"]


def conversations(seed: int, count: int) -> list[list[Message]]:
    rng = random.Random(seed)

    def said() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 2, 5])))

    return [
        [{"role": ("user", "assistant")[index % 2], "content": said()} for index in range(2 * rng.randint(1, 4))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_text_is_that_of_apply_chat_template(name: str) -> None:
    template = ChatTemplate(SHAPES[name].tokenizer())
    for messages in conversations(0, 40):
        template.render_plain(messages)
    assert template._plain.trusted
    for again in (template, copy.deepcopy(template), pickle.loads(pickle.dumps(template))):
        for messages in conversations(1, 40):
            assert again.render_plain(messages) == template.render(messages, None)


def test_what_the_template_refuses_is_refused() -> None:
    tokenizer = SHAPES["chatml"].tokenizer()
    refusal = "{% if messages[0].content == 'bad' %}{{ raise_exception('not so') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    template = ChatTemplate(tokenizer)
    for messages in conversations(0, 40):
        template.render_plain(messages)
    assert template._plain.trusted
    with pytest.raises(UnusableRow) as refused:
        template.render_plain([{"role": "user", "content": "bad"}, {"role": "assistant", "content": "b"}])
    assert refused.value.problem.reason == "the chat template refuses the row"
    assert "not so" in refused.value.problem.detail


class Other:
    def render(self, **values: object) -> str:
        return "another text"


def test_another_text_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "compiled", lambda _: Other())
    template = ChatTemplate(SHAPES["chatml"].tokenizer())
    for messages in conversations(0, 80):
        assert template.render_plain(messages) == template.render(messages, None)
    assert not template._plain.trusted


def test_without_the_compiled_template_the_long_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in transformers is not public."""
    monkeypatch.setattr(rendering, "compiled", lambda _: None)
    template = ChatTemplate(SHAPES["chatml"].tokenizer())
    for messages in conversations(0, 40):
        assert template.render_plain(messages) == template.render(messages, None)


def test_transformers_has_the_compiled_template() -> None:
    """Where it has not, preparation still works, only slower: then this test asks to look for its new name."""
    assert rendering.compiled("{{ messages }}") is not None
