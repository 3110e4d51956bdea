"""``tokenizer.json``, as Hugging Face's models bring it, by the ``tokenizers`` library (extra ``[hf]``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.tokens.tokenizer import Tokenizer


class JsonTokenizer(Tokenizer):
    """The tokenizer that a ``tokenizer.json`` describes."""

    def __init__(
        self,
        text: str,
        where: str = "tokenizer.json",
        *,
        end: str | None = None,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """``end`` is the token after a text. Raises UsageError, naming ``where``, for a text that describes none."""
        library = tokenizers_library()
        try:
            self._inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exceptions
            raise UsageError(f"{where} describes no tokenizer: {error}; get the file anew") from None
        self._inner.no_padding()
        self._inner.no_truncation()
        self.vocabulary = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.sha256 = sha256(text.encode()).hexdigest()
        self.end = self._inner.token_to_id(end) if end is not None else None
        self.chat_template, self.special = chat_template, dict(special or {})
        if not self.vocabulary:
            raise UsageError(f"{where} describes a tokenizer without any tokens; get the file anew")
        if end is not None and self.end is None:
            raise UsageError(f"{where} has no token {end!r}, which ends a text; get the files anew")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._inner.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._inner.encode_batch(list(texts), add_special_tokens=False)]


def tokenizers_library() -> Any:
    """The library, imported when it is first needed."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError("a tokenizer.json needs the tokenizers library: pip install 'spmd_engine[hf]'") from None
    return tokenizers


def read_tokenizer(path: str | Path) -> JsonTokenizer:
    """The tokenizer of a model's folder, or of one ``tokenizer.json``, with what is in ``tokenizer_config.json`` and
    ``chat_template.jinja`` beside it. Raises UsageError for files that are missing or damaged."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file}: no such file; a model's folder has its tokenizer there")
    config = _read_json(file.with_name("tokenizer_config.json"))
    template = file.with_name("chat_template.jinja")
    chat = template.read_text() if template.is_file() else config.get("chat_template")
    if isinstance(chat, list):  # several by name, of which one is the usual
        named = {each.get("name"): each.get("template") for each in chat if isinstance(each, Mapping)}
        chat = named.get("default") or next(iter(named.values()), None)
    special = {name: _content(value) for name, value in config.items() if name.endswith("_token") and _content(value)}
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} describes no tokenizer: {error}; get the file anew") from None
    return JsonTokenizer(text, str(file), end=special.get("eos_token"), chat_template=chat, special=special)


def _content(value: Any) -> str:
    """A token, which may stand there with how it is to be treated."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"{file} cannot be read as JSON: {error}; get the file anew") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{file} must hold an object, {{...}}")
    return content
