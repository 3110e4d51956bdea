"""The tokenizer of GPT-2 and its kin as they first came: ``vocab.json`` and ``merges.txt``, no tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_engine.foreign import parse_json, reading

VOCABULARY, MERGES = "vocab.json", "merges.txt"
#: Classes, as ``tokenizer_config.json`` names them, whose texts are cut as GPT-2's before pairs are merged.
CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


def byte_level_json(vocabulary: str, merges: str, config: Mapping[str, Any], library: Any, where: str) -> str:
    """What a ``tokenizer.json`` would say of the content of the two files and of ``tokenizer_config.json``; ``library``
    is ``tokenizers``. Raises UsageError, naming ``where``, for files that are damaged."""
    with reading(f"{where}: {VOCABULARY} and {MERGES} make no tokenizer", "; get them anew"):
        pairs = [tuple(line.split(" ")) for line in merges.splitlines() if line and not line.startswith("#version")]
        made = library.Tokenizer(library.models.BPE(parse_json(vocabulary), pairs))
    spaced = bool(config.get("add_prefix_space"))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    made.decoder = library.decoders.ByteLevel()
    made.post_processor = library.processors.ByteLevel(trim_offsets=False)
    named = [config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")]
    texts = [each.get("content") if isinstance(each, Mapping) else each for each in named]
    texts = [each for each in texts if isinstance(each, str) and made.token_to_id(each) is not None]
    made.add_special_tokens([library.AddedToken(each, special=True) for each in dict.fromkeys(texts)])
    return made.to_str()


def remedy(folder: Path) -> str:
    """What to say of a folder that has a tokenizer of another format; nothing if it has none."""
    others = ("tokenizer.model", "spiece.model", "vocab.txt", VOCABULARY)
    for name in others:
        if (folder / name).is_file():
            return (
                f"; {name} is there instead: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of "
                "transformers writes the other"
            )
    return ""
