"""Write `tests/golden/adapter/`: an adapter as PEFT writes it, of the tiny Llama of make_golden_decoders.py.

    pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
    python scripts/make_golden_adapter.py

`reference.npz` has `tokens`, and the `logits` of the model with the adapter, in float64 without transformers' casts.
"""

from pathlib import Path

import make_golden_decoders as decoders
import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model

FOLDER = decoders.FOLDER.parent / "adapter"


def main():
    """The adapter and its logits."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(decoders.FOLDER / "llama", dtype=torch.float32)
    base.config._attn_implementation = "eager"
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=targets, use_rslora=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(FOLDER)
    Path(FOLDER, "README.md").unlink(missing_ok=True)
    decoders.without_casts()
    model = model.double().eval()
    decoders.frequencies(model.base_model.model)
    tokens = torch.randint(23, (2, 40), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    np.savez_compressed(FOLDER / "reference.npz", tokens=tokens.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    main()
