"""Convert the models in PyPI's `glassllm` (MIT licence) to folders in Hugging Face's format.

    pip install glassllm==0.1.0
    python scripts/convert_glassllm.py en models/glass-en

They are real models of 852,608 parameters, trained on a few books in English (en) and Portuguese (pt). They have
Llama's architecture with an MLP of width 341, two key heads for four heads, a tied head, and rotary positions that pair
adjacent dims. Hugging Face's format pairs the two halves, so the rows of query and key weights are permuted. The
tokenizer becomes `tokenizer.json`: NFC normalization, spaces as a visible mark, words split from line ends, then
byte-pair merges of characters.
"""

import json
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SPECIALS = ["<pad>", "<unk>", "<bos>", "<eos>"]
SPACE = "▁"


def convert(language, folder):
    """Write the folder for `en` or `pt`."""
    source, folder = files("glassllm") / "weights", Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (source / f"{language}.npz").open("rb") as file:
        arrays = dict(np.load(file))
    settings = json.loads(str(arrays.pop("__config__")))
    tensors = dict(renamed(arrays, settings["d_model"] // settings["n_heads"]))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    write(folder / "config.json", config(settings, hidden=arrays["blocks.0.ffn.W1"].shape[1]))
    write(folder / "tokenizer.json", tokenizer(json.loads((source / f"{language}.tokenizer.json").read_text("utf-8"))))
    write(folder / "tokenizer_config.json", {"unk_token": "<unk>", "clean_up_tokenization_spaces": False})


def renamed(arrays, head_width):
    """Names and arrays in Llama's format: output dims first."""
    halves = np.arange(head_width).reshape(-1, 2).T.reshape(-1)  # rows of a head: the first of each pair come first
    names = {
        "attn.W_Q": "self_attn.q_proj",
        "attn.W_K": "self_attn.k_proj",
        "attn.W_V": "self_attn.v_proj",
        "attn.W_O": "self_attn.o_proj",
        "ffn.W1": "mlp.gate_proj",
        "ffn.W3": "mlp.up_proj",
        "ffn.W2": "mlp.down_proj",
        "norm1.gamma": "input_layernorm",
        "norm2.gamma": "post_attention_layernorm",
    }
    for name, array in arrays.items():
        if name == "E":
            yield "model.embed_tokens.weight", array
        elif name == "norm_f.gamma":
            yield "model.norm.weight", array
        else:
            _, layer, suffix = name.split(".", 2)
            rows = array.T
            if suffix in ("attn.W_Q", "attn.W_K"):
                rows = rows.reshape(-1, head_width, rows.shape[1])[:, halves].reshape(rows.shape)
            yield f"model.layers.{layer}.{names[suffix]}.weight", rows


def config(settings, hidden):
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": settings["vocab_size"],
        "hidden_size": settings["d_model"],
        "intermediate_size": hidden,
        "num_hidden_layers": settings["n_layers"],
        "num_attention_heads": settings["n_heads"],
        "num_key_value_heads": settings["n_kv_heads"],
        "max_position_embeddings": settings["max_len"],
        "rope_theta": settings["rope_base"],
        "rms_norm_eps": settings["eps"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def tokenizer(content):
    """The content of `tokenizer.json`."""
    vocabulary = SPECIALS + content["alphabet"] + [left + right for left, right in content["merges"]]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text} | special for number, text in enumerate(SPECIALS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": f"\\n|{SPACE}*[^{SPACE}\\n]+|{SPACE}+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(vocabulary)},
            "merges": content["merges"],
        },
    }


def write(path, content):
    """Write JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("en", "pt"):
        sys.exit("usage: python scripts/convert_glassllm.py en|pt FOLDER")
    convert(*sys.argv[1:])
