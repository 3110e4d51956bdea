"""Write the activations of a model's folder in transformers, layer by layer, for `verify --import`.

    pip install torch transformers numpy
    python scripts/reference_activations.py FOLDER FILE.npz [LENGTH]

The file has `tokens` (random, 2 sequences of LENGTH, by default 80), `hidden_states.0` after the embedding,
`hidden_states.N` after N blocks, and `blockN/attention` (the engine's name): the residual stream between a block's
attention and its MLP. Then

    python -m spmd_engine verify --import FOLDER --reference FILE.npz

names the first layer that differs.
"""

import sys
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def keep(out, name, module, inputs):
    """A hook that stores the input of a module under a name."""
    out[name] = inputs[0]


def between(block):
    """The module of a transformers block that the residual stream enters between attention and MLP, if any."""
    children = dict(block.named_children())
    if getattr(block, "use_parallel_residual", False):
        return None
    if "post_feedforward_layernorm" in children:
        return children.get("pre_feedforward_layernorm", children["mlp"])
    if "self_attn_layer_norm" in children:
        return children["final_layer_norm"]
    return children.get("post_attention_layernorm") or children.get("ln_2")


def main(folder, file, length=80):
    """Write the file."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config._experts_implementation = "eager"  # the others need widths that are multiples of 16
    tokens = torch.randint(model.config.vocab_size, (2, int(length)), generator=torch.Generator().manual_seed(0))
    out = {"tokens": tokens}
    for name, module in model.named_modules():
        number = name.rpartition(".")[2]
        if number.isdecimal() and (entered := between(module)) is not None:
            entered.register_forward_pre_hook(partial(keep, out, f"block{number}/attention"))
    with torch.no_grad():
        result = model(tokens, output_hidden_states=True, use_cache=False)
    out |= {f"hidden_states.{number}": array for number, array in enumerate(result.hidden_states)}
    for name in out.keys() - {"tokens"}:  # OPT concatenates samples
        out[name] = out[name].reshape(*tokens.shape, -1)
    np.savez_compressed(file, **{name: array.numpy() for name, array in out.items()}, logits=result.logits.numpy())
    print(file, f"{len(out) + 1} arrays")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python scripts/reference_activations.py FOLDER FILE.npz [LENGTH]")
    main(*sys.argv[1:])
