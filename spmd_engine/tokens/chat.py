"""Conversations as the text that a model was taught them as, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from spmd_engine.errors import UsageError
from spmd_engine.tokens.tokenizer import Tokenizer

Message = Mapping[str, Any]  #: {"role": "user", "content": "Hello"}


def chat_text(tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool = True) -> str:
    """A conversation as text; with the beginning of the assistant's next turn, if an ``answer`` is to follow.

    Templates are programs of strangers: they run in jinja's sandbox, without access to attributes that lead out of
    it, and cannot change what they are given. Raises UsageError for a tokenizer without a template, for one that is
    damaged, and for messages that it refuses.
    """
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template; write the prompt as it was taught, without --chat")
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UsageError("a chat template needs jinja2: pip install 'spmd_engine[hf]'") from None

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}``, which mark what an assistant says: written as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _as_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    try:
        template = environment.from_string(tokenizer.chat_template)
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": answer}
        return template.render({**tokenizer.special, **given})
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise UsageError(f"the chat template cannot write this conversation: {error}") from None


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers' filter of this name; jinja's own would write characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
