"""Write what transformers computes with a model's folder, layer by layer, for `verify --import`.

    pip install torch transformers numpy
    python scripts/reference_activations.py FOLDER FILE.npz [LENGTH]

The file has `tokens` (random, 2 sequences of LENGTH, by default 80), `hidden_states.0`, which follows the embedding,
`hidden_states.N` after N blocks, and, called as here, `blockN/attention`: the residual stream between a block's
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
    """A hook: what goes into a module, under a name."""
    out[name] = inputs[0]


def main(folder, file, length=80):
    """Write the file."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config._experts_implementation = "eager"  # the others want widths that are multiples of 16
    tokens = torch.randint(model.config.vocab_size, (2, int(length)), generator=torch.Generator().manual_seed(0))
    out = {"tokens": tokens}
    for name, module in model.named_modules():
        block, _, own = name.rpartition(".")
        if own in ("post_attention_layernorm", "ln_2"):
            module.register_forward_pre_hook(partial(keep, out, f"block{block.rpartition('.')[2]}/attention"))
    with torch.no_grad():
        result = model(tokens, output_hidden_states=True, use_cache=False)
    out |= {f"hidden_states.{number}": each for number, each in enumerate(result.hidden_states)}
    np.savez_compressed(file, **{name: each.numpy() for name, each in out.items()}, logits=result.logits.numpy())
    print(file, f"{len(out) + 1} arrays")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python scripts/reference_activations.py FOLDER FILE.npz [LENGTH]")
    main(*sys.argv[1:])
