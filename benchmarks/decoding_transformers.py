"""Runs the rows of `bench_decoding.py` with transformers and eager PyTorch, on one rank: one of its workers."""

import os
import sys

import torch
import transformers
from decoding_protocol import ALPHA, LONG, NEW, PROMPT, RANK, TRAIN, measure, tokens


def main():
    """All rows except the one on several ranks."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size

    def write(batch):
        prompts = torch.from_numpy(tokens(batch, PROMPT, vocabulary))
        mask = torch.ones_like(prompts)
        fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

        def step():
            with torch.inference_mode():
                model.generate(prompts, attention_mask=mask, **fixed)

        return step

    def read(length):
        text = torch.from_numpy(tokens(1, length, vocabulary))

        def step():
            with torch.inference_mode():
                model(text, use_cache=True, logits_to_keep=1).logits.argmax()

        return step

    def train(model):
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-5
        )
        inputs, targets = torch.from_numpy(tokens(2 * TRAIN[0], TRAIN[1], vocabulary)).reshape(2, *TRAIN)

        def step():
            optimizer.zero_grad()
            logits = model(inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    def adapted():
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))

    measure({
        "memory": lambda: read(128), "batch 1": lambda: write(1), "batch 8": lambda: write(8),
        "prefill": lambda: read(LONG), "train": lambda: train(model), "adapters": lambda: train(adapted()),
        "clock": lambda: write(1),
    })  # fmt: skip


if __name__ == "__main__":
    main()
