"""The fields of a ``config.json``: each is read, known to be harmless, refused, or named in a warning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from spmd_engine.errors import CheckpointError

#: Fields that no logits depend on: training, programs that wrote or run it, defaults of generation, special tokens.
HARMLESS = frozenset((
    "_name_or_path", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "_commit_hash", "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled",
    "architectures", "attn_implementation", "auto_map", "cache_implementation", "dtype", "is_decoder",
    "is_llama_config", "language", "license", "model_max_length", "model_name", "model_type", "name_or_path",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "use_bfloat16",
    "use_cache", "use_flash_attn", "pretraining_tp", "tp_plan", "unsloth_fixed", "unsloth_version", "use_mambapy",
    "max_window_layers", "no_rope_layer_interval", "_sliding_window_pattern", "sliding_window_pattern",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "embd_layer_dropout",
    "initializer_range", "initializer_factor", "gradient_checkpointing", "router_aux_loss_coef",
    "router_jitter_noise", "input_jitter_noise", "router_z_loss_coef", "output_router_logits", "output_attentions",
    "output_hidden_states", "return_dict", "return_dict_in_generate", "remove_invalid_values",
    "reorder_and_upcast_attn", "n_ctx", "chunk_size_feed_forward", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "decoder_start_token_id", "image_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "do_sample", "temperature",
    "top_k", "top_p", "typical_p", "min_p", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "early_stopping", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "output_scores", "encoder_no_repeat_ngram_size", "repetition_penalty",
    "exponential_decay_length_penalty", "finetuning_task", "id2label", "label2id", "num_labels", "prefix",
    "problem_type", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tf_legacy_loss", "pruned_heads", "tie_encoder_decoder",
    "cross_attention_hidden_size", "dropout", "layerdrop", "classifier_dropout", "resid_dropout", "embed_dropout",
    "residual_dropout", "embedding_dropout", "activation_dropout", "init_std", "attention_softmax_in_fp32",
    "_num_labels", "full_attn_mod", "interpolate_factor", "init_device",
    "scale_attention_softmax_in_fp32", "mlp_type"
))  # fmt: skip

#: Fields that change what is computed, and their supported values (None, 0, false and "" aside); those that the record
#: of a family describes are read before.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "mlp_bias": (),
    "clip_qkv": (),
    "do_layer_norm_before": (True,),
    "layer_norm_elementwise_affine": (True,),
    "enable_bias": (True,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (),
    "sliding_window": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "scale_attn_weights": (True,),
    "is_encoder_decoder": (),
    "use_bidirectional_attention": (),
    "quantization_config": (),
}
#: Any other field with a name like these probably changes what is computed.
_COMPUTES = re.compile(
    r"scal(e|ing)|sparse|multiplier|softcap|capping|clip|window|chunk|rope|rotary|alibi|norm|bias|expert|moe|act_fn|activation"
    r"|attention|attn|layer|hidden|lora|quant|dim|width|head|mup|parallel_residual|interleave"
)


class Fields(Mapping[str, Any]):
    """A config that records which of its fields are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._read = content, set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def left(self) -> list[str]:
        """The fields that were not read."""
        return [name for name in self._content if name not in self._read]

    def check_rest(self, where: str) -> list[str]:
        """The fields that were not read and are unknown; raises CheckpointError, naming the field, for one that changes
        what is computed, or would, to go by its name."""
        unknown = []
        for name in self.left():
            value = self._content[name]
            if name in HARMLESS:
                continue
            if name in REFUSED:
                supported = REFUSED[name]
                refused = value and value not in supported or value is False and supported == (True,)
            else:
                refused = value and _COMPUTES.search(name)
            if refused:
                raise CheckpointError(f"{where}: {name} is {value!r}, which is not supported")
            if value and name not in REFUSED:
                unknown.append(name)
        return unknown
