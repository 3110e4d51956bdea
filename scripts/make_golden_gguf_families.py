"""Write `tests/golden/gguf_families/`: tiny decoders written by llama.cpp's converter, and their logits.

    pip install torch==2.13.0 transformers==5.23.0 gguf==0.18.0 sentencepiece numpy
    python scripts/make_golden_gguf_families.py LLAMA_CPP [NAME ...]

`LLAMA_CPP` is a folder of llama.cpp's sources, with `conversion/` and `gguf-py/`, such as `vendor/llama.cpp` in the
source archive of PyPI's llama-cpp-python 0.3.36; its own `gguf` is used. A NAME is, or begins with, the
general.architecture of the file, except for models that are converted as another.

A model of transformers with random weights, as in make_golden_decoders.py, is saved and converted to float32.
`NAME.npz` has `tokens`[b s] and the model's float64 `logits` at the last eight positions. Weights with one dim are
multiples of 1/256, so that those of a Gemma, to which the converter adds 1, are exact in the file. Fields of
`config.json` that the converter needs and transformers 5 no longer writes are added.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import make_golden_decoders as decoders
import numpy as np
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "gguf_families"
LAST = 8
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
FAR = decoders.LLAMA3 | {"rope_theta": 1e7, "original_max_position_embeddings": 8192}  # as in Llama 3.1
#: For each file: the model of make_golden_decoders.py, changes of its configuration, and additions to its config.json.
MODELS = {
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 4}, {}),
    "gemma3": ("gemma3", {
        "query_pre_attn_scalar": 4, "num_hidden_layers": 6, "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, {}),
    "phi3": ("phi3", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmo2_windows": ("olmo3", {}, {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
    "granite": ("granite", {}, {}),
    "granite_4": ("granitemoehybrid", {}, {"layer_types": ["attention"] * 2, "num_experts_per_tok": 0}),
    "granitemoe": ("granitemoe", {"num_hidden_layers": 1}, {}),
    "llama_biased": ("llama_biased", {"hidden_act": "silu"}, {}),
    "llama_short": ("llama", {}, {}),
    "mixtral": ("mixtral", {"num_hidden_layers": 1}, {}),
    "qwen2_yarn": ("qwen2_yarn", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, {}),
    "qwen2moe": ("qwen2_moe", {
        "num_hidden_layers": 1, "decoder_sparse_step": 1, "layer_types": ["full_attention"]}, {}),
    "olmoe": ("olmoe", {"num_hidden_layers": 1}, {}),
    "olmo": ("olmo", {}, {}),
    "command-r": ("cohere", {}, {}),
    "cohere2": ("cohere2", {
        "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, {"rotary_pct": 1.0}),
    "falcon": ("falcon", {"ffn_hidden_size": 48, "num_kv_heads": 1}, {}),
    "falcon_grouped": ("falcon_grouped", {"ffn_hidden_size": 96, "bias": False, "num_hidden_layers": 1}, {}),
    "stablelm": ("stablelm", {}, {}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True, "num_hidden_layers": 1}, {}),
    "nemotron": ("nemotron", {}, {}),
    "smollm3": ("smollm3", {
        "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "use_sliding_window": False, "sliding_window": None,
        "layer_types": ["full_attention"] * 4}, {}),
    "chatglm": ("glm", {"hidden_size": 24, "rms_norm_eps": 1e-5}, {"seq_length": 96}),
    "glm4": ("glm4", {}, {}),
    "mistral3": ("ministral3", {}, {}),
    "ernie4_5": ("ernie4_5", {}, {}),
    "exaone": ("llama", {"attention_bias": False, "hidden_size": 24, "rope_parameters": FAR}, {
        "model_type": "exaone", "architectures": ["ExaoneForCausalLM"], "activation_function": "silu"}),
    "exaone4": ("exaone4", {}, {}),
    "hunyuan-dense": ("hunyuan_v1_dense", {
        "max_position_embeddings": 32768, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}}, {}),
    "seed_oss": ("seed_oss", {}, {}),
    "bloom": ("bloom", {}, {}),
    "mpt": ("mpt", {"attn_config": {}, "d_model": 12, "n_layers": 1}, {"architectures": ["MPTForCausalLM"]}),
    "gptneox": ("gpt_neox", {}, {"rotary_pct": 0.5}),
    "phi2": ("phi", {"num_key_value_heads": 6, "intermediate_size": 96, "num_hidden_layers": 1}, {}),
    "internlm2": ("llama", {"attention_bias": False, "head_dim": 2, "rope_parameters": PLAIN}, {
        "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}),
    "minicpm": ("granite", {"attention_multiplier": 2**-0.5, "logits_scaling": 1.5}, {
        "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_emb": 1.7, "dim_model_base": 8,
        "scale_depth": 0.6 * 2**0.5}),
    "starcoder": ("gpt_bigcode", {"n_inner": 48}, {}),
    "arcee": ("arcee", {}, {}),
    "jais2": ("jais2", {}, {}),
}  # fmt: skip
IN_PARTS = {"arcee": 12}  # tensors per file, of a model in several files
#: Parts of tensor names, for models that transformers does not have.
RENAMED = {
    "exaone": {
        "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
        "self_attn": "attn.attention", "o_proj": "out_proj", "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    },
    "internlm2": {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    },
}  # fmt: skip


def configuration(base, changes):
    """A configuration of make_golden_decoders.py, with changes."""
    settings = {name: value for name, value in decoders.MODELS[base].to_dict().items() if name not in changes}
    return type(decoders.MODELS[base])(**{**settings, **changes})


def model_of(name, base, config):
    """A model with random weights; those with one dim are multiples of 1/256."""
    model = decoders.with_random_weights(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_((parameter * 256).round() / 256)
    return model


def save(name, model, beside, folder):
    """Save as transformers does; rename models that it does not have, and add fields that the converter needs."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({
        "model": {"vocab": dict.fromkeys(map(str, range(model.config.vocab_size)))}, "added_tokens": []}))  # fmt: skip
    config = json.loads((folder / "config.json").read_text()) | beside
    if name == "exaone":
        config["num_layers"] = config.pop("num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    if name == "internlm2":
        for layer in range(config["num_hidden_layers"]):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{letter}_proj.weight") for letter in "qkv"]
            groups = [part.reshape(config["num_key_value_heads"], -1, config["hidden_size"]) for part in parts]
            fused = torch.cat(groups, 1).reshape(-1, config["hidden_size"])
            tensors[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    for old, new in RENAMED.get(name, {}).items():
        tensors = {key.replace(old, new): tensor for key, tensor in tensors.items()}
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def convert(name, beside, folder):
    """Convert with llama.cpp's converter, without a vocabulary; ``beside`` has the fields that it would miss."""
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase

    settings = ModelBase.load_hparams(folder, False) | beside
    kind = get_model_class(settings["architectures"][0])
    options = {"eager": True, "hparams": settings, "split_max_tensors": IN_PARTS.get(name, 0)}
    converter = kind(folder, gguf.LlamaFileType.ALL_F32, FOLDER / f"{name}.gguf", **options)
    for instance in (converter, getattr(converter, "impl", converter)):
        instance.set_vocab = lambda instance=instance: instance.gguf_writer.add_tokenizer_model("none")
    converter.write()


def main():
    """Write all models, or those that are named: first the files, then the logits."""
    sources, *names = sys.argv[1:]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    models = {}
    for name in names or MODELS:
        base, changes, beside = MODELS[name]
        models[name] = model_of(name, base, configuration(base, changes))
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name  # the folder's name becomes the model's name in the file
            save(name, models[name], beside, folder)
            convert(name, beside, folder)
    decoders.without_casts()
    for name, model in models.items():
        tokens = torch.randint(model.config.vocab_size, (1, 72), generator=torch.Generator().manual_seed(2))
        model = model.double()
        decoders.frequencies(model)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[:, -LAST:]
        np.savez_compressed(FOLDER / f"{name}.npz", tokens=tokens.numpy(), logits=logits.numpy())
        print(name, "logits to", f"{logits.abs().max():.2f}")


if __name__ == "__main__":
    main()
