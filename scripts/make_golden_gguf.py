"""Write `tests/golden/gguf/`: tiny GGUF files with tensors of all supported types, and their logits.

    pip install torch==2.13.0 transformers==5.23.0 gguf==0.18.0 numpy
    python scripts/make_golden_gguf.py

`llama.gguf` has Llama 3's rope_freqs, and queries and keys with adjacent rotary pairs, as llama.cpp's converter writes
them; `qwen3moe.gguf` has all experts of a layer in one tensor. The `gguf` package quantizes and dequantizes;
`blocks.npz` has blocks of random bytes of every quantized type, and the values that the package reads from them.
`NAME.npz` has `tokens` and the `logits` that transformers computes in float64 with the dequantized weights, as in
make_golden_decoders.py.
"""

from pathlib import Path

import gguf
import make_golden_decoders as decoders
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "gguf"
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
LLAMA3 = decoders.LLAMA3 | {"original_max_position_embeddings": 8192}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3, rms_norm_eps=1e-5),
    "qwen3moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        tie_word_embeddings=True),
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
#: Types of quantized tensors; all others are F32.
TYPES = {
    "token_embd": Type.BF16,
    "attn_q": Type.Q8_0,
    "attn_k": Type.Q4_0,
    "attn_v": Type.F16,
    "attn_output": Type.Q4_1,
    "ffn_gate": Type.Q4_1,
    "ffn_up": Type.Q8_0,
    "ffn_down": Type.Q4_0,
    "ffn_gate_exps": Type.Q4_0,
    "ffn_up_exps": Type.Q8_0,
    "ffn_down_exps": Type.Q4_1,
}


def tensors_of(model):
    """Names in the file and the model's parameters for them: one each, except for experts."""
    for name, parameter in model.named_parameters():
        plain = name.removesuffix(".weight")
        if plain.endswith("experts.gate_up_proj"):
            gate, up = parameter.data.chunk(2, dim=1)
            yield "blk.0.ffn_gate_exps.weight", gate
            yield "blk.0.ffn_up_exps.weight", up
        elif plain.endswith("experts.down_proj"):
            yield "blk.0.ffn_down_exps.weight", parameter.data
        elif plain in NAMES:
            yield f"{NAMES[plain]}.weight", parameter.data
        else:
            _, _, layer, suffix = plain.split(".", 3)
            yield f"blk.{layer}.{NAMES[suffix]}.weight", parameter.data


def neighbours(rows, heads):
    """Interleave the two halves of the rows of each head: the converter's `permute`."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def add_tensor(writer, tensor, values, kind):
    """Add a tensor to the file, quantized; returns the values that a reader gets."""
    packed = gguf.quantize(values, kind)
    writer.add_tensor(tensor, packed, raw_dtype=kind)
    return gguf.dequantize(packed, kind).reshape(values.shape)


def finish(writer):
    """Write the file, after all metadata and tensors are added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(name, config):
    """Write one file; returns the results of its model."""
    torch.manual_seed(3)
    config.initializer_range, config._attn_implementation, config._experts_implementation = 0.3, "eager", "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    writer = gguf.GGUFWriter(FOLDER / f"{name}.gguf", name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    if name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    else:
        plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for tensor, parameter in tensors_of(model):
        if parameter.ndim == 1:
            parameter += 0.3 * torch.randn_like(parameter)
        suffix = tensor.removeprefix("blk.0.").removesuffix(".weight")
        turn = suffix in ("attn_q", "attn_k") and name == "llama"
        heads = config.num_attention_heads if suffix == "attn_q" else config.num_key_value_heads
        values = np.ascontiguousarray(neighbours(parameter.numpy(), heads) if turn else parameter.numpy())
        kind = TYPES.get(suffix, Type.F32)
        unpacked = add_tensor(writer, tensor, values, kind)
        if turn:  # the inverse
            unpacked = unpacked.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(unpacked)))
    finish(writer)
    return model


def write_gpt2():
    """Write a GPT-2, whose weights the converter transposes."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=96, n_inner=64)
    config.initializer_range, config._attn_implementation = 0.3, "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    writer = gguf.GGUFWriter(FOLDER / "gpt2.gguf", "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, parameter in model.transformer.named_parameters():
        if parameter.ndim == 1:
            parameter += 0.3 * torch.randn_like(parameter)
        turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        tensor = names.get_name(f"transformer.{name}", try_suffixes=(".weight", ".bias"))
        values = np.ascontiguousarray((parameter.T if turned else parameter).numpy())
        kind = Type.Q8_0 if parameter.ndim > 1 and "wpe" not in name else Type.F32
        unpacked = torch.from_numpy(np.ascontiguousarray(add_tensor(writer, tensor, values, kind)))
        parameter.copy_(unpacked.T if turned else unpacked)
    finish(writer)
    return model


def write_blocks():
    """Write three random blocks of each type, with finite float16 numbers at the bytes given here."""
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    halves |= {"Q4_K": (0, 2), "Q5_K": (0, 2)}
    rng, arrays = np.random.default_rng(5), {}
    for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]:
        blocks = rng.integers(0, 256, (3, gguf.GGML_QUANT_SIZES[Type[name]][1]), np.uint8)
        for at in halves.get(name, (0,)):
            blocks[:, at : at + 2] = rng.normal(size=(3, 1)).astype(np.float16).view(np.uint8)
        arrays |= {f"{name} bytes": blocks, name: gguf.dequantize(blocks, Type[name])}
    np.savez_compressed(FOLDER / "blocks.npz", **arrays)


@torch.no_grad()
def main():
    """Write all files, then their logits."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_blocks()
    models = {name: write(name, config) for name, config in MODELS.items()}
    models["gpt2"] = write_gpt2()
    decoders.without_casts()
    tokens = torch.randint(40, (2, 70), generator=torch.Generator().manual_seed(4))
    for name, model in models.items():
        model = model.double()
        decoders.frequencies(model)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        np.savez_compressed(FOLDER / f"{name}.npz", tokens=tokens.numpy(), logits=logits.numpy())
        print(name, (FOLDER / f"{name}.gguf").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
