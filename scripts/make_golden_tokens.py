"""Write `tests/golden/tokens.json`: tokens of texts and conversations by transformers' AutoTokenizer.

    pip install transformers==5.23.0 sentencepiece
    python scripts/make_golden_tokens.py

    transformers   the version
    tokenizers     by name, the tokenizer.json of small vocabularies, learnt from this documentation
    folders        by name, the files of a model's folder; "tokenizer.json" is the name of one of the tokenizers
    texts          what is encoded
    ids            by folder, the tokens of each text, with those that the tokenizer adds around it
    ends           by folder, the end token; without one, the first of generation_config.json or config.json; or null
    templates      by name, a chat template, with `generation` tags around what is learnt, and its tokenizer
    conversations  messages
    chats          by template, the tokens of each conversation and their flags: 1 is learnt

Flags are those of `apply_chat_template(..., return_assistant_tokens_mask=True)`, which follows the tags. Where a
template writes no end after the last answer, the end token follows here, and is learnt.
"""

import json
import tempfile
from pathlib import Path

import tokenizers
import transformers

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "golden" / "tokens.json"
SPACE = "\u2581"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>", "[CLS]", "[SEP]", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<pad>",
    "[PAD]", "[MASK]", "<mask>",
]  # fmt: skip
TEXTS = [
    "", " ", "  ", "\n", "a", " a", "a ", "  a  b  ", "Hello world", "Hello, world! It's 12345 o'clock.",
    "first\nsecond", "first\r\nsecond", "\n\nfirst\n\n\nsecond\n", "\ttab\t\ttabs", "don't you'll WE'RE I'd",
    "1", "12", "123 4567 89012", "3.14159 x 10^-7", "0x1F", "na\u00efve caf\u00e9", "Gr\u00f6\u00dfe", "\u6570\u5b57",
    "\u65e5\u672c\u8a9e\u306e\u6587", "\ud55c\uad6d\uc5b4", "\u0440\u0443\u0441\u0441\u043a\u0438\u0439", "\U0001f642",
    "\U0001f469\u200d\U0001f467 family", "a\u0301 combining", "\ufb01 ligature", "\u00bd half", "\u3000wide",
    "a\u00a0b",
    "</s>", "<s>", "<unk>", "a<unk>b", "a <unk> b", "<s>a", "<s> a", "a</s>", "a </s> b", "a</s>\nb", "a</s>  b",
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b", "<|im_start|>user\nHi<|im_end|>\n",
    "<|user|>\nHi<|end|>\n",    "<|user|>  two<|end|>  spaces", "<bos>a", "[CLS] a [SEP]",
    "def f(x):\n    return x + 1\n", "{\"key\": [1, 2]}",
    "https://example.org/a?b=c&d=e", "UPPER lower MiXeD", "aaaaaaaaaaaaaaaaaaaa",
    "----====++++", "\u2028line", "a\x00b",
]  # fmt: skip


def texts_to_learn():
    return [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))[:12]]


def byte_level(*splits, normalizer=None):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    if normalizer:
        made.normalizer = normalizer
    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in splits]
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*steps, level]) if steps else level
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=430, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<unk>", *MARKS], show_progress=False
    )
    made.train_from_iterator(texts_to_learn(), trainer)
    return made


def sentence_piece(form="older", rstrip=()):
    """As Llama 2's: bytes for unknown characters, and a text is one word. Spaces become letters by a normalizer in the
    older form, by a pre-tokenizer in the newer one. Gemma's texts do not begin with one."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(SPACE), tokenizers.normalizers.Replace(" ", SPACE)]
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"{SPACE}+[^{SPACE}]*"), "isolated")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=520, special_tokens=special, show_progress=False)
    made.train_from_iterator(texts_to_learn(), trainer)
    described = json.loads(made.to_str())
    described["model"] |= {"byte_fallback": True, "fuse_unk": True}
    described["added_tokens"] = [each | {"rstrip": each["content"] in rstrip} for each in described["added_tokens"][:3]]
    described["pre_tokenizer"] = None
    if form == "newer":
        described |= {"normalizer": None}
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    if form == "newer":
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if form == "gemma":
        made.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    module = tokenizers.decoders
    strip = [] if form == "gemma" else [module.Strip(" ", 1, 0)]
    made.decoder = module.Sequence([module.Replace(SPACE, " "), module.ByteFallback(), module.Fuse(), *strip])
    made.add_special_tokens(
        [tokenizers.AddedToken(mark, special=True, normalized=False, rstrip=mark in rstrip) for mark in MARKS]
    )
    return with_begin(made, "<bos>" if form == "gemma" else "<s>")


def unigram():
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<pad>", "</s>", "<unk>", "<s>"], show_progress=False
    )
    made.train_from_iterator(texts_to_learn(), trainer)
    number = made.token_to_id("</s>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", number)]
    )
    return made


def word_piece():
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = (
        tokenizers.normalizers.BertNormalizer(),
        tokenizers.pre_tokenizers.BertPreTokenizer(),
    )
    made.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    made.train_from_iterator(texts_to_learn(), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def with_begin(tokenizer, token, end=""):
    special = [(each, tokenizer.token_to_id(each)) for each in (token, end) if each]
    one, other = (" ".join(filter(None, (token, place, end))) for place in ("$A", "$B"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=one, pair=f"{one} {other}", special_tokens=special
    )
    return tokenizer


PHI3 = ["</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TOKENIZERS = {
    "byte level": byte_level(),
    "byte level, NFC": byte_level(normalizer=tokenizers.normalizers.NFC()),
    "qwen 2": byte_level(LLAMA3.replace("{1,3}", ""), normalizer=tokenizers.normalizers.NFC()),
    "llama 3": with_begin(byte_level(LLAMA3), "<|begin_of_text|>"),
    "sentence piece": sentence_piece(),
    "sentence piece that ends": with_begin(sentence_piece(), "<s>", "</s>"),
    "sentence piece, newer": sentence_piece("newer"),
    "gemma": sentence_piece("gemma"),
    "phi 3": sentence_piece(rstrip=PHI3),
    "unigram": unigram(),
    "word piece": word_piece(),
}
ANY = {"tokenizer_class": "PreTrainedTokenizerFast"}
E, S = "<|endoftext|>", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
AROUND = {"add_bos_token": True, "add_eos_token": True}


def folder(tokenizer, config=None, special=None, model=None, generation=None):
    files = {"tokenizer.json": tokenizer}
    named = {"tokenizer_config.json": config, "special_tokens_map.json": special, "config.json": model}
    return files | {
        name: content
        for name, content in (named | {"generation_config.json": generation}).items()
        if content is not None
    }


FOLDERS = {
    "gpt2 as published": folder(
        "byte level", {"model_max_length": 1024}, None, {"model_type": "gpt2", "eos_token_id": 3}
    ),
    "gpt2": folder("byte level", {"tokenizer_class": "GPT2Tokenizer"}),
    "gpt2 with others": folder(
        "byte level", {"tokenizer_class": "GPT2TokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "opt": folder("byte level", {"tokenizer_class": "GPT2Tokenizer", **S}, S, {"model_type": "opt"}),
    "any, in the config": folder("byte level", {**ANY, "eos_token": E}),
    "any, as an object": folder(
        "byte level", {**ANY, "eos_token": {"__type": "AddedToken", "content": E, "special": True}}
    ),
    "any, in the map": folder("byte level", ANY, {"eos_token": E, "bos_token": {"content": "<s>"}}),
    "any, in both": folder("byte level", {**ANY, "eos_token": "</s>"}, {"eos_token": E}),
    "any, null": folder("byte level", {**ANY, "bos_token": None, "eos_token": E}),
    "any, in a newer folder": folder(
        "byte level", {**ANY, "eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": E}
    ),
    "gpt neo": folder("byte level", {"eos_token": E}, None, {"model_type": "gpt_neo"}),
    "qwen2": folder("qwen 2", {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}),
    "qwen2 by default": folder("qwen 2", {"tokenizer_class": "Qwen2Tokenizer"}, None, {"model_type": "qwen3"}),
    "qwen2 by its model": folder("qwen 2", {}, None, {"model_type": "qwen2"}),
    "gpt neox": folder("byte level, NFC", {"tokenizer_class": "GPTNeoXTokenizer"}),
    "codegen": folder("byte level", {"tokenizer_class": "CodeGenTokenizer"}),
    "llama 3": folder("llama 3", {**ANY, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "llama 3 without a class": folder(
        "llama 3", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, None, {"model_type": "llama"}
    ),
    "llama 2": folder(
        "sentence piece, newer",
        {"tokenizer_class": "LlamaTokenizer", **S, "add_bos_token": True, "add_eos_token": False},
    ),
    "llama 2 fast": folder("sentence piece, newer", {"tokenizer_class": "LlamaTokenizerFast", **S}),
    "llama 2 by default": folder(
        "sentence piece, newer", {"tokenizer_class": "LlamaTokenizer"}, None, {"model_type": "llama"}
    ),
    "mistral": folder(
        "sentence piece", {"tokenizer_class": "LlamaTokenizer", **S, "legacy": True}, S, {"model_type": "mistral"}
    ),
    "any sentence piece": folder("sentence piece", {**ANY, **S}),
    "any that ends": folder("sentence piece that ends", {**ANY, **S, **AROUND}),
    "gemma": folder("gemma", {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}),
    "gemma by default": folder("gemma", {"tokenizer_class": "GemmaTokenizer"}, None, {"model_type": "gemma2"}),
    "phi 3": folder("phi 3", {"tokenizer_class": "LlamaTokenizer", **S, "eos_token": E}, None, {"model_type": "phi3"}),
    "any unigram": folder("unigram", {**ANY, "eos_token": "</s>", "unk_token": "<unk>"}),
    "bert": folder("word piece", {"tokenizer_class": "BertTokenizer"}),
    "any word piece": folder("word piece", {**ANY, "cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "end of generation": folder("byte level", ANY, None, None, {"eos_token_id": [4, 5]}),
    "end of the model": folder("byte level", ANY, None, {"eos_token_id": 5}),
}

G, _G = "{% generation %}", "{% endgeneration %}"
NEWLINE = "{{ '\\n' }}"  # after a tag, jinja takes a line break away
SYSTEM = "{% if messages[0].role == 'system' %}"
TEMPLATES = {
    "chatml": ("qwen2",
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n" + G + "{{ m.content }}<|im_end|>"
        + _G + NEWLINE + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"),
    "llama 2": ("llama 2",
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
        "{% elif m.role == 'assistant' %}" + G + " {{ m.content | trim }} {{ eos_token }}" + _G
        + "{% endif %}{% endfor %}"),
    "llama 3": ("llama 3",
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.role == 'assistant' %}" + G + "{{ m.content | trim }}<|eot_id|>" + _G
        + "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"),
    "mistral": ("mistral",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %}" + G + "{{ m.content }}{{ eos_token }}" + _G + "{% endif %}{% endfor %}"),
    "zephyr": ("mistral",
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}" + G + "{{ m.content }}{{ eos_token }}"
        + _G + NEWLINE + "{% else %}{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
    "phi 3": ("phi 3",
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}" + G + "{{ m.content }}<|end|>" + _G
        + NEWLINE + "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
    "gemma": ("gemma",
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if m.role == 'assistant' %}" + G + "{{ m.content | trim }}<end_of_turn>" + _G
        + NEWLINE + "{% else %}{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"),
    "vicuna": ("llama 2",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
        "{% elif m.role == 'assistant' %}ASSISTANT:" + G + " {{ m.content }}{{ eos_token }}" + _G
        + "{% else %}{{ m.content }} "
        "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"),
    "without an end": ("gpt2 as published",
        "{% for m in messages %}{% if m.role == 'assistant' %}A:" + G + " {{ m.content }}\n" + _G
        + "{% else %}Q: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"),
}  # fmt: skip
CONVERSATIONS = [
    [("user", "Hello"), ("assistant", "Hi!")],
    [
        ("user", "add the default"),
        ("assistant", "value 12345"),
        ("user", "na\u00efve \u6570"),
        ("assistant", "\U0001f642 yes\nand no"),
    ],
    [
        ("user", " spaces  around "),
        ("assistant", "It's  two  spaces"),
        ("user", "more"),
        ("assistant", "No."),
        ("user", "?"),
        ("assistant", "!"),
    ],
]


def write_folder(path, files, template=None):
    path.mkdir(parents=True)
    for name, content in files.items():
        text = TOKENIZERS[content].to_str() if name == "tokenizer.json" else json.dumps(content)
        (path / name).write_text(text)
    if template:
        (path / "chat_template.jinja").write_text(template)
    return path


def main():
    ids, ends, chats = {}, {}, {}
    conversations = [[{"role": role, "content": text} for role, text in each] for each in CONVERSATIONS]
    with tempfile.TemporaryDirectory() as temporary:
        for name, files in FOLDERS.items():
            read = transformers.AutoTokenizer.from_pretrained(write_folder(Path(temporary, name), files))
            ids[name] = [read(text)["input_ids"] for text in TEXTS]
            ends[name] = read.eos_token_id
            if ends[name] is None:
                numbers = files.get("generation_config.json", files.get("config.json", {})).get("eos_token_id")
                ends[name] = numbers[0] if isinstance(numbers, list) else numbers
        for name, (chosen, template) in TEMPLATES.items():
            path = write_folder(Path(temporary, "templates", name), FOLDERS[chosen], template)
            read = transformers.AutoTokenizer.from_pretrained(path)
            chats[name] = []
            for messages in conversations:
                found = read.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                tokens, flags = found["input_ids"], found["assistant_masks"]
                if name == "without an end":
                    tokens, flags = [*tokens, read.eos_token_id], [*flags, 1]
                chats[name].append({"tokens": tokens, "learnt": flags})
    content = {
        "transformers": transformers.__version__,
        "tokenizers": {name: made.to_str() for name, made in TOKENIZERS.items()},
        "folders": FOLDERS,
        "texts": TEXTS,
        "ids": ids,
        "ends": ends,
        "templates": {name: {"folder": chosen, "template": template} for name, (chosen, template) in TEMPLATES.items()},
        "conversations": conversations,
        "chats": chats,
    }
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
