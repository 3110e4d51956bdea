"""Write `tests/golden/adapter/`: adapters that PEFT writes for the tiny models of make_golden_decoders.py.

    pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
    python scripts/make_golden_adapter.py [FAMILY ...]

In each folder `reference.npz` has `tokens`, and the `logits` of the model with the adapter, in float64 without the
casts of transformers.
"""

import sys
from pathlib import Path

import make_golden_decoders as decoders
import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model

FOLDER = decoders.FOLDER.parent / "adapter"
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "falcon_grouped": ["query_key_value", "dense", "dense_h_to_4h"],
    "gpt_neox": ["query_key_value", "dense", "dense_4h_to_h"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mixtral": ["q_proj"],
    "olmoe": ["q_proj", "gate_proj", "up_proj", "down_proj"],  # PEFT makes one adapter for all experts of a layer
}
#: Weights of all experts of a layer in one parameter.
PARAMETERS = {"mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def make(family):
    """Write an adapter for the model of a family; returns the model with it."""
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(decoders.FOLDER / family, dtype=torch.float32)
    base.config._attn_implementation = base.config._experts_implementation = "eager"
    options = {"target_modules": TARGETS[family], "target_parameters": PARAMETERS.get(family)}
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, use_rslora=family != "olmoe", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    model.peft_config["default"].base_model_name_or_path = f"../decoders/{family}"  # not a path on this machine
    model.save_pretrained(FOLDER / family)
    Path(FOLDER, family, "README.md").unlink(missing_ok=True)
    return model


def main():
    """Write all adapters, or those that are named, and their logits."""
    torch.set_num_threads(1)
    models = {family: make(family) for family in sys.argv[1:] or TARGETS}
    decoders.without_casts()
    for family, model in models.items():
        model = model.double().eval()
        decoders.frequencies(model.base_model.model)
        tokens = torch.randint(23, (2, 40), generator=torch.Generator().manual_seed(6))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        np.savez_compressed(FOLDER / family / "reference.npz", tokens=tokens.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()
