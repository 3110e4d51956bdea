"""Write `tests/golden/gpt2_tiny.npz`, golden vectors of a tiny GPT-2 computed by PyTorch.

    pip install torch==2.13.0 numpy
    python scripts/make_golden.py

The model is `GPT` of `benchmarks/torch_gpt.py`: vocabulary 61, context 12, 2 layers, width 16, 4 heads, hidden 64,
LayerNorm epsilon 1e-5, tanh GELU, head tied to the token table. The data is one batch of 3 x 12
tokens, targets and mask; the loss is the mean cross-entropy over the tokens whose mask is true.

The file holds (letters as in that file; NAME is the engine's name of a parameter):

    initial/NAME       float64   seeded normals: weights and biases with std 0.3, norm scales 1 + such a normal
    tokens, targets    int64     b s
    mask               bool      b s; true where the target counts
    logits64, loss64, gradient64/NAME    float64, from the initial parameters
    logits32, loss32, gradient32/NAME    float32 throughout, from the initial parameters cast to float32
    losses, norms      float64   one per step: the loss and the gradients' global norm, both before that
                                 step's update, the norm also before clipping
    final/NAME         float64   the parameters after the last step
    hyper/...          0-d       every number given here: vocabulary, context, layers, width, heads, hidden,
                                 norm_epsilon, batch, steps, learning_rate, beta1, beta2, epsilon,
                                 weight_decay, clip_norm, seed

The ten training steps run in float64 on that one batch with AdamW: learning rate 1e-2, betas 0.9 and
0.95, epsilon 1e-8, weight decay 0.1 on tables and weight matrices (embedding, positions, query, key,
value, output, w0, w1) and none on biases and norms, also not on the query, key and value biases, which
the engine holds as "h k". Decay is decoupled, p *= 1 - learning_rate * weight_decay before the update,
and epsilon is added to sqrt(v / (1 - beta2^t)). Before each update every gradient is multiplied by
min(1, clip_norm / (norm + 1e-6)), clip_norm 1.0, which is what torch.nn.utils.clip_grad_norm_ does.

Only the gradient of key_bias is trivially zero: a key bias adds the same number to all scores of a
query, which softmax ignores, so its true gradient is 0 and the file holds rounding noise (1e-17 in
float64, 1e-9 in float32). Compare it, and its final value, with an absolute tolerance.

Two runs on one machine give equal arrays; other processors may differ in the last bits.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from torch_gpt import GPT, adamw_groups, cross_entropy, gradients_by_name, load_by_name, parameters_by_name

PATH = Path(__file__).resolve().parent.parent / "tests" / "golden" / "gpt2_tiny.npz"
SHAPE = {"vocabulary": 61, "context": 12, "layers": 2, "width": 16, "heads": 4}
HYPER = SHAPE | {
    "hidden": 64,
    "norm_epsilon": 1e-5,
    "batch": 3,
    "steps": 10,
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "seed": 20240607,
}


def initial_parameters(generator):
    """Float64 parameters by name, without zeros and ones, so that no term of a gradient vanishes."""
    shapes = {name: value.shape for name, value in parameters_by_name(GPT(**SHAPE)).items()}
    noise = {name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: 1 + value if name.endswith("norm/scale") else value for name, value in noise.items()}


def batch_of_data(generator):
    """Tokens, targets (both int64) and mask (bool), each b s; about a quarter is masked out."""
    shape = HYPER["batch"], HYPER["context"]
    tokens, targets = torch.randint(HYPER["vocabulary"], (2, *shape), generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.75
    return tokens, targets, mask


def model_of(parameters, dtype):
    """A tiny GPT in `dtype` with these `parameters`."""
    model = GPT(**SHAPE).to(dtype)
    load_by_name(model, parameters)
    return model


def one_pass(parameters, data, dtype):
    """Logits, loss and gradients by name, computed at `parameters` in `dtype`."""
    tokens, targets, mask = data
    model = model_of(parameters, dtype)
    logits = model(tokens)
    loss = cross_entropy(logits, targets, mask)
    loss.backward()
    return logits.detach(), loss.detach(), gradients_by_name(model)


def train(parameters, data):
    """Losses, gradient norms and final parameters of the float64 AdamW steps."""
    tokens, targets, mask = data
    model = model_of(parameters, torch.float64)
    optimizer = torch.optim.AdamW(
        adamw_groups(model, HYPER["weight_decay"]),
        lr=HYPER["learning_rate"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["epsilon"],
        foreach=False,
    )
    losses, norms = [], []
    for _ in range(HYPER["steps"]):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets, mask)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = sum((gradient**2).sum() for gradient in gradients).sqrt().item()
        scale = min(1.0, HYPER["clip_norm"] / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, parameters_by_name(model)


def as_array(value):
    """A tensor, list or number as a NumPy array in C order."""
    return np.array(value.numpy() if torch.is_tensor(value) else value, order="C")


def golden():
    """The content of the file: arrays by key."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(HYPER["seed"])
    initial, data = initial_parameters(generator), batch_of_data(generator)
    out = dict(zip(("tokens", "targets", "mask"), data, strict=True))
    groups = {"hyper": HYPER, "initial": initial}
    for bits, dtype in (("32", torch.float32), ("64", torch.float64)):
        out[f"logits{bits}"], out[f"loss{bits}"], groups[f"gradient{bits}"] = one_pass(initial, data, dtype)
    out["losses"], out["norms"], groups["final"] = train(initial, data)
    out |= {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
    return {key: as_array(value) for key, value in out.items()}


def main():
    """Write the file and list its content."""
    arrays = golden()
    PATH.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.name}: {len(arrays)} arrays, {PATH.stat().st_size} bytes, torch {torch.__version__}")
    print("losses", *(f"{loss:.4f}" for loss in arrays["losses"]))
    print("norms ", *(f"{norm:.4f}" for norm in arrays["norms"]))


if __name__ == "__main__":
    main()
