"""Write `tests/golden/sampling.npz`: scores before and after transformers' own logits processors.

    pip install torch==2.13.0 transformers==5.23.0 numpy
    python scripts/make_golden_sampling.py

    scores    float64  c v: one row per case; some rows have equal scores, and -inf
    seen      int64    c s: the earlier tokens of the row, some of them repeated
    options   float64  c 5: repetition penalty, temperature, top-k (0: none), top-p (1: none), min-p (0: none)
    allowed   float64  c v: the scores after the processors, -inf for excluded tokens

The processors are those that `generate` builds from a `GenerationConfig`, in its order.
"""

import itertools
from pathlib import Path

import numpy as np
import torch
import transformers

FILE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "sampling.npz"
VOCABULARY, SEEN = 40, 9
ONE = [
    (1.0, 1.0, 0, 1.0, 0.0), (1.7, 1.0, 0, 1.0, 0.0), (0.6, 1.0, 0, 1.0, 0.0), (1.0, 0.3, 0, 1.0, 0.0),
    (1.0, 4.0, 0, 1.0, 0.0), (1.0, 1.0, 1, 1.0, 0.0), (1.0, 1.0, 7, 1.0, 0.0), (1.0, 1.0, 40, 1.0, 0.0),
    (1.0, 1.0, 100, 1.0, 0.0), (1.0, 1.0, 0, 0.0, 0.0), (1.0, 1.0, 0, 0.01, 0.0), (1.0, 1.0, 0, 0.5, 0.0),
    (1.0, 1.0, 0, 0.9, 0.0), (1.0, 1.0, 0, 0.999999, 0.0), (1.0, 1.0, 0, 1.0, 0.2), (1.0, 1.0, 0, 1.0, 1.0),
    (1.0, 1.0, 0, 1.0, 1e-6),
]  # fmt: skip
SEVERAL = list(itertools.product((1.3,), (0.7, 2.0), (0, 12), (0.8, 1.0), (0.0, 0.1)))


def processors(penalty, temperature, top_k, top_p, min_p):
    """The processors that `generate` builds."""
    config = transformers.GenerationConfig(
        do_sample=True, repetition_penalty=penalty, temperature=temperature, top_k=int(top_k), top_p=top_p,
        min_p=min_p or None,
    )  # fmt: skip
    tiny = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                                 num_attention_heads=1)
    )  # fmt: skip
    return tiny._get_logits_processor(config, input_ids_seq_length=SEEN, logits_processor=[], device="cpu")


def main():
    """Write each case with plain scores, with equal scores, and with -inf."""
    random, options, before, texts, after = np.random.default_rng(7), [], [], [], []
    for case in ONE + SEVERAL:
        chain = processors(*case)
        for kind in ("plain", "equal", "infinite"):
            scores = 3 * random.standard_normal(VOCABULARY)
            if kind == "equal":
                scores = np.round(scores)
            if kind == "infinite":
                scores[random.choice(VOCABULARY, 25, replace=False)] = -np.inf
            tokens = random.integers(0, VOCABULARY, SEEN)
            processed = chain(torch.from_numpy(tokens)[None], torch.from_numpy(scores)[None].clone())
            options.append(case)
            before.append(scores)
            texts.append(tokens)
            after.append(processed[0].numpy())
    arrays = {"scores": before, "seen": texts, "options": options, "allowed": after}
    np.savez_compressed(FILE, **{name: np.array(values) for name, values in arrays.items()})
    print(len(options), "cases", FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
