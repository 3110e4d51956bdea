"""Write `tests/golden/decoders/`: tiny decoders with random weights, and their results in transformers.

    pip install torch==2.13.0 transformers==5.23.0 numpy
    python scripts/make_golden_decoders.py [NAME ...]

Each family has a folder as `save_pretrained` writes it (config.json, model.safetensors, float32 weights), and
`reference.npz`:

    tokens, targets  int64    b s; s is above 64, where errors of rotary positions become visible
    logits64         float64  b s v, of the model in float64 with the stored weights
    loss64           float64  the mean cross-entropy of the targets
    gradient/NAME    float64  of that loss, with the names of `state_dict`
    logits32         float32  of the last eight positions, of the unchanged model

For float64, the casts to float32 in transformers are patched out: in RMSNorm, the angles of rotary positions, the
softmax of the attention (the "eager" one takes a dtype) and that of the router. Only then does agreement to 1e-10 show
that the formulas are equal. All weights are random, including norms and biases.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LAST = 8  # positions whose float32 logits are stored
FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "decoders"
SIZES = {
    "vocab_size": 23,
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
OF_HEADS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"hidden_size": 24}
#: Families with smaller weights; else float32 would be too far from float64.
GENTLE = ("bloom", "cwm", "ministral3", "glm", "hunyuan_v1_dense", "ministral")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
MODELS = {
    "gpt2": transformers.GPT2Config(vocab_size=23, n_embd=12, n_layer=2, n_head=3, n_positions=96, n_inner=20),
    "llama": transformers.LlamaConfig(
        **SIZES, head_dim=4, rope_parameters=LLAMA3, rms_norm_eps=1e-5, attention_bias=True),
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=4, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=7, norm_topk_prob=True,
        mlp_only_layers=[1]),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=4, sliding_window=10),
    "qwen2_yarn": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=13, max_window_layers=1,
        rope_parameters={"rope_type": "yarn", "rope_theta": 300.0, "factor": 3.0,
                         "original_max_position_embeddings": 32}),
    "phi3": transformers.Phi3Config(
        **SIZES | {"hidden_size": 24}, sliding_window=20, pad_token_id=None, original_max_position_embeddings=80,
        partial_rotary_factor=0.5, rope_parameters={"rope_type": "longrope", "rope_theta": 300.0,
                                                    "short_factor": [1.5], "long_factor": [4.0]}),
    "smollm3": transformers.SmolLM3Config(
        **SIZES, no_rope_layer_interval=2, pad_token_id=None, use_sliding_window=True, sliding_window=7),
    "granite": transformers.GraniteConfig(
        **SIZES, embedding_multiplier=1.7, residual_multiplier=0.6, attention_multiplier=0.3, logits_scaling=1.9),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=4, pad_token_id=None),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, head_dim=4, pad_token_id=None, sliding_window=9, layer_types=["full_attention", "sliding_attention"],
        query_pre_attn_scalar=30, rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}),
    "llama_biased": transformers.LlamaConfig(
        **SIZES, head_dim=4, mlp_bias=True, hidden_act="gelu", tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 90.0, "factor": 2.0}),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=4, pad_token_id=None, sliding_window=9, query_pre_attn_scalar=30, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0),
    "olmo2": transformers.Olmo2Config(**SIZES, pad_token_id=None),
    "olmo3": transformers.Olmo3Config(
        **SIZES, pad_token_id=None, sliding_window=9, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 300.0, "factor": 3.0,
                               "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, pad_token_id=None),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7, shared_expert_intermediate_size=14,
        decoder_sparse_step=2),
    "gpt_neo": transformers.GPTNeoConfig(
        vocab_size=23, hidden_size=12, num_layers=2, num_heads=3, max_position_embeddings=96, intermediate_size=20,
        attention_types=[[["global", "local"], 1]], window_size=9),
    "gpt_neox": transformers.GPTNeoXConfig(
        **OF_HEADS, rope_parameters={"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5}),
    "opt": transformers.OPTConfig(
        vocab_size=23, hidden_size=12, ffn_dim=14, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=96, pad_token_id=None),
    "phi": transformers.PhiConfig(**OF_HEADS, num_key_value_heads=2),
    "stablelm": transformers.StableLmConfig(
        **OF_HEADS | {"num_key_value_heads": 2}, use_qkv_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5}),
    "starcoder2": transformers.Starcoder2Config(**SIZES, sliding_window=10),
    "olmo": transformers.OlmoConfig(**SIZES, pad_token_id=None),
    "cohere": transformers.CohereConfig(**SIZES | {"hidden_size": 24}, pad_token_id=None, logit_scale=0.3),
    "cohere2": transformers.Cohere2Config(
        **SIZES, head_dim=4, pad_token_id=None, sliding_window=10,
        layer_types=["sliding_attention", "full_attention"]),
    "gptj": transformers.GPTJConfig(
        vocab_size=23, n_embd=24, n_layer=2, n_head=3, n_positions=96, n_inner=20, rotary_dim=4),
    "falcon": transformers.FalconConfig(
        vocab_size=23, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, ffn_hidden_size=14,
        max_position_embeddings=96),
    "granitemoe": transformers.GraniteMoeConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=1.7, residual_multiplier=0.6,
        attention_multiplier=0.3, logits_scaling=1.9),
    "arcee": transformers.ArceeConfig(**SIZES, head_dim=4, attention_bias=True, mlp_bias=True),
    "seed_oss": transformers.SeedOssConfig(**SIZES, head_dim=4, attention_out_bias=True, pad_token_id=None),
    "exaone4": transformers.Exaone4Config(
        **SIZES, sliding_window=10, layer_types=["sliding_attention", "full_attention"]),
    "glm": transformers.GlmConfig(**SIZES, head_dim=4, pad_token_id=None),
    "glm4": transformers.Glm4Config(**SIZES, head_dim=4, pad_token_id=None),
    "ernie4_5": transformers.Ernie4_5Config(**SIZES, head_dim=4, pad_token_id=None, use_bias=True),
    "helium": transformers.HeliumConfig(
        **SIZES | {"hidden_size": 24}, head_dim=4, pad_token_id=None, attention_bias=True),
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config(
        **SIZES, head_dim=4, pad_token_id=None, rope_parameters={
            "rope_type": "dynamic", "rope_theta": 90.0, "alpha": 7.0, "factor": 1.0}),
    "nemotron": transformers.NemotronConfig(**SIZES | {"hidden_size": 24}, head_dim=4, pad_token_id=None),
    "jais2": transformers.Jais2Config(**SIZES, head_dim=4, pad_token_id=None),
    "cwm": transformers.CwmConfig(**SIZES, head_dim=4, sliding_window=10),
    "ministral": transformers.MinistralConfig(
        **SIZES, head_dim=4, sliding_window=10, layer_types=["full_attention", "sliding_attention"]),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **SIZES, num_local_experts=0, shared_intermediate_size=14, layer_types=["full_attention"] * 2, mamba_n_heads=4,
        position_embedding_type="rope", embedding_multiplier=1.7, residual_multiplier=0.6, attention_multiplier=0.3,
        logits_scaling=1.9),
    "ministral3": transformers.Ministral3Config(
        **SIZES, head_dim=4, pad_token_id=None, rope_parameters={
            "rope_type": "yarn", "rope_theta": 300.0, "factor": 3.0, "original_max_position_embeddings": 80,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}),
    "falcon_grouped": transformers.FalconConfig(
        vocab_size=23, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_kv_heads=2, ffn_hidden_size=14,
        max_position_embeddings=96, new_decoder_architecture=True, bias=True),
    "bloom": transformers.BloomConfig(
        vocab_size=23, hidden_size=12, n_layer=2, n_head=6, seq_length=96, pad_token_id=None),
    "mpt": transformers.MptConfig(
        vocab_size=23, d_model=24, n_layers=2, n_heads=6, max_seq_len=96, attn_config={"softmax_scale": 0.3}),
    "gpt_bigcode": transformers.GPTBigCodeConfig(
        vocab_size=23, n_embd=12, n_layer=2, n_head=3, n_positions=96, n_inner=20),
    "internlm3": transformers.InternLM3Config(
        **SIZES, head_dim=4, pad_token_id=None, attention_bias=True, mlp_bias=True),
}  # fmt: skip


def without_casts():
    """Replace all casts to float32 in the modules of transformers."""

    def rms_norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rms_norm_of_gemma(self, x):
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def layer_norm_of_cohere(self, x):
        return self.weight * functional.layer_norm(x, x.shape[-1:], eps=self.variance_epsilon)

    def layer_norm_of_olmo(self, x):
        return functional.layer_norm(x, self.normalized_shape, eps=1e-5)

    def embedding_of_gemma(self, tokens):
        return torch.nn.Embedding.forward(self, tokens) * self.scalar_embed_scale

    def rotary(self, x, position_ids, layer_type=""):
        prefix = f"{layer_type}_" if layer_type else ""
        wide = getattr(self, prefix + "inv_freq64") if hasattr(self, prefix + "inv_freq64") else self.inv_freq
        angles = position_ids[:, :, None].to(x.dtype) * wide.to(x.dtype)
        both = torch.cat((angles, angles), dim=-1)
        if "Cohere" in type(self).__name__:
            both = angles.repeat_interleave(2, dim=-1)
        scaling = getattr(self, prefix + "attention_scaling")
        return both.cos() * scaling, both.sin() * scaling

    def attention_of_gpt_neo(self, query, key, value, attention_mask=None):
        scores, visible = query @ key.transpose(-1, -2), self.bias[:, :, : query.size(-2), : key.size(-2)]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return weights @ value, weights

    def attention_of_gptj(self, query, key, value, attention_mask=None):
        weights = (query @ key.transpose(-1, -2) / self.scale_attn + attention_mask).softmax(-1)
        return weights @ value, weights

    def gelu_of_bloom(x):  # bloom rounds the root of 2 / pi to eight digits
        return functional.gelu(x, approximate="tanh")

    transformers.models.bloom.modeling_bloom.bloom_gelu_forward = gelu_of_bloom
    transformers.models.gptj.modeling_gptj.GPTJAttention._attn = attention_of_gptj
    transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention._attn = attention_of_gpt_neo
    for family in (
        "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3", "smollm3", "granite", "gemma", "gemma3",
        "gemma2", "olmo2", "olmo3", "olmoe", "qwen2_moe", "gpt_neox", "phi", "stablelm", "starcoder2", "olmo", "cohere",
        "cohere2", "falcon", "granitemoe", "arcee", "seed_oss", "exaone4", "glm", "glm4", "ernie4_5", "helium",
        "hunyuan_v1_dense", "nemotron", "jais2", "cwm", "ministral", "ministral3", "granitemoehybrid",
    ):  # fmt: skip
        module = getattr(transformers.models, family)
        module = getattr(module, f"modeling_{family}")
        for name in dir(module):
            if name.endswith("RMSNorm"):
                getattr(module, name).forward = rms_norm_of_gemma if "Gemma" in name else rms_norm
            if name in ("CohereLayerNorm", "Cohere2LayerNorm"):
                getattr(module, name).forward = layer_norm_of_cohere
            if name == "OlmoLayerNorm":
                getattr(module, name).forward = layer_norm_of_olmo
            if name.endswith("ScaledWordEmbedding"):
                getattr(module, name).forward = embedding_of_gemma
            if name.endswith("RotaryEmbedding"):
                getattr(module, name).forward = rotary
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda x: x if x.dtype is torch.float64 else narrow(x)  # for the router's logits
    plain = functional.softmax

    def softmax(x, dim=None, dtype=None, **options):
        return plain(x, dim=dim, dtype=x.dtype if dtype is torch.float32 else dtype)

    functional.softmax = torch.nn.functional.softmax = softmax


def frequencies(model):
    """Rotary frequencies in float64, from the functions of transformers with float32 replaced by float64."""
    for module in model.modules():
        if hasattr(module, "embed_positions") and isinstance(module.embed_positions, torch.Tensor):  # GPT-J's
            exponents = torch.arange(0, module.pos_embd_dim, 2, dtype=torch.float64) / module.pos_embd_dim
            angles = torch.arange(module.max_positions, dtype=torch.float64)[:, None] / 10000**exponents
            module.embed_positions = torch.cat((angles.sin(), angles.cos()), dim=1)
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]:
            if "original" in name:
                continue
            layer_type = name.removesuffix("inv_freq").removesuffix("_")
            kind = (module.rope_type[layer_type] if layer_type else module.rope_type) or "default"
            make = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS.get(kind)
            make = make or getattr(module, f"compute_{kind}_rope_parameters")
            narrow, torch.float, torch.float32 = torch.float32, torch.float64, torch.float64
            try:
                wide, scaling = make(model.config, **({"layer_type": layer_type} if layer_type else {}))
            finally:
                torch.float = torch.float32 = narrow
            assert wide.dtype is torch.float64
            torch.testing.assert_close(wide.float(), getattr(module, name).float(), rtol=1e-5, atol=0)
            setattr(module, f"{name}64", wide)
            setattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", scaling)


def with_random_weights(family, config):
    """Give a model random weights, also where the initial values are 0 or 1."""
    torch.manual_seed(1)
    gentle = getattr(config, "hidden_size", 12) > 12 or family in GENTLE
    config.initializer_range = config.init_std = 0.1 if gentle else 0.3
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def make(family, config):
    """Write the folder of a family; returns the model and its results before the patch."""
    model = with_random_weights(family, config)
    shutil.rmtree(FOLDER / family, ignore_errors=True)
    model.save_pretrained(FOLDER / family)
    (FOLDER / family / "generation_config.json").unlink(missing_ok=True)
    tokens, targets = torch.randint(config.vocab_size, (2, 2, 72), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    return model, {"tokens": tokens, "targets": targets, "logits32": logits[:, -LAST:]}


def in_float64(model, out):
    """The results with those of the model in float64 added; call it after ``without_casts``."""
    model = model.double()
    frequencies(model)
    logits = model(out["tokens"], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), out["targets"].flatten())
    loss.backward()
    gradients = {f"gradient/{name}": parameter.grad for name, parameter in model.named_parameters()}
    out = out | {"logits64": logits, "loss64": loss} | gradients
    return {name: np.array(array.detach().numpy(), order="C") for name, array in out.items()}


def main():
    """Write all families, or those that are named: first with unchanged transformers, then with the patch."""
    torch.set_num_threads(1)
    models = {family: make(family, config) for family, config in MODELS.items() if family in (sys.argv[1:] or MODELS)}
    without_casts()
    for family, (model, out) in models.items():
        arrays = in_float64(model, out)
        np.savez_compressed(FOLDER / family / "reference.npz", **arrays)
        off = abs(arrays["logits32"] - arrays["logits64"][:, -LAST:]).max()
        print(family, f"loss {arrays['loss64']:.4f}", f"float32 is {off:.1e} off")


if __name__ == "__main__":
    main()
