"""The trained model that comes in the wheel of ``glassllm`` 0.1.0 (MIT), as a folder of Hugging Face's format.

It is a Llama of 852,608 parameters whose rotary positions turn neighbours: its rows are put where halves are turned.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
HEADS, KEY_HEADS, WIDTH = 4, 2, 128
NAMES = {
    "norm1.gamma": "input_layernorm.weight",
    "norm2.gamma": "post_attention_layernorm.weight",
    "attn.W_Q": "self_attn.q_proj.weight",
    "attn.W_K": "self_attn.k_proj.weight",
    "attn.W_V": "self_attn.v_proj.weight",
    "attn.W_O": "self_attn.o_proj.weight",
    "ffn.W1": "mlp.gate_proj.weight",
    "ffn.W3": "mlp.up_proj.weight",
    "ffn.W2": "mlp.down_proj.weight",
}


def is_installed():
    return find_spec("glassllm") is not None


def _weights():
    return Path(find_spec("glassllm").origin).parent / "weights"


def write_folder(folder):
    """config.json, model.safetensors and tokenizer.json of the English model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": 341,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": 128,
        "vocab_size": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    (folder / "config.json").write_text(json.dumps(config))
    arrays = np.load(_weights() / "en.npz")
    tensors = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for layer in range(4):
        for own, name in NAMES.items():
            x = arrays[f"blocks.{layer}.{own}"]
            if own in ("attn.W_Q", "attn.W_K"):
                x = _halves(x, HEADS if own == "attn.W_Q" else KEY_HEADS)
            tensors[f"model.layers.{layer}.{name}"] = x.T
    contiguous = {name: np.ascontiguousarray(x.astype(np.float32)) for name, x in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "unk_token": "<unk>"}))
    return folder


def _halves(x, heads):
    """[d h k], of which neighbours in k are pairs, such that halves are."""
    pairs = x.reshape(len(x), heads, -1, 2)
    return pairs.swapaxes(2, 3).reshape(len(x), -1)


def write_tokenizer(file):
    """Characters and merges, as ``glassllm``'s own tokenizer applies them."""
    read = json.loads((_weights() / "en.tokenizer.json").read_text())
    pairs = [tuple(pair) for pair in read["merges"]]
    tokens = [*SPECIAL, *read["alphabet"], *(left + right for left, right in pairs)]
    added = [
        {"id": number, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, token in enumerate(SPECIAL)
    ]
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "\\n|▁*[^▁\\n]+|▁+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in pairs],
        },
    }
    Path(file).write_text(json.dumps(content, ensure_ascii=False))
