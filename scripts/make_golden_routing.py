"""Write `tests/golden/routing.npz`: results of the routers of known models, computed by transformers.

    pip install torch==2.13.0 transformers==5.23.0 numpy
    python scripts/make_golden_routing.py

Each router is the class of transformers. Its weight is the identity, so that its input is its logits. These classes
always compute in float32; here float32 is replaced by float64, so that the vectors are exact.

The file holds, for t 24 tokens and E 12 experts (NAME: mixtral, qwen3, qwen3_plain, gpt_oss, deepseek_v3):

    logits, upstream     float64   t E
    bias                 float64   E; added to deepseek_v3's scores to choose experts
    NAME/experts         int64     t k, the lower expert first
    NAME/weights         float64   t k, in that order
    NAME/gradient        float64   t E, by the logits, of the sum over t and k of weights * upstream[t, experts]
    balance/K, balance_gradient/K    for K choices: transformers' load_balancing_loss_func divided by K, and t E
    z_loss, z_gradient   of mean(logsumexp(logits)^2), and t E
"""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

PATH = Path(__file__).resolve().parent.parent / "tests" / "golden" / "routing.npz"
TOKENS, EXPERTS, SEED = 24, 12, 20261122
ROUTERS = {
    "mixtral": (MixtralTopKRouter, {"num_experts_per_tok": 2}),
    "qwen3": (Qwen3MoeTopKRouter, {"num_experts_per_tok": 4, "norm_topk_prob": True}),
    "qwen3_plain": (Qwen3MoeTopKRouter, {"num_experts_per_tok": 4, "norm_topk_prob": False}),
    "gpt_oss": (GptOssTopKRouter, {"num_experts_per_tok": 3}),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        {"num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
    ),
}


def doubles():
    """A context in which float32 is float64."""
    stack = ExitStack()
    stack.enter_context(mock.patch.multiple(torch, float=torch.float64, float32=torch.float64))
    stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
    return stack


def router_of(kind, settings, bias):
    """A router whose logits equal its input."""
    config = SimpleNamespace(num_experts=EXPERTS, num_local_experts=EXPERTS, hidden_size=EXPERTS, **settings)
    router = kind(config).double()
    router.weight.data = torch.eye(EXPERTS, dtype=torch.float64)
    if hasattr(router, "bias"):
        router.bias.data = torch.zeros(EXPERTS, dtype=torch.float64)
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias = bias
    return router


def routed(router, logits, upstream):
    """Experts, weights and the gradient, the lower expert first."""
    z = logits.clone().requires_grad_()
    _, weights, experts = router(z)
    (weights * upstream.gather(1, experts)).sum().backward()
    order = experts.argsort(dim=1)
    return {"experts": experts.gather(1, order), "weights": weights.detach().gather(1, order), "gradient": z.grad}


def with_gradient(loss, logits):
    """The value of a loss of the logits, and the gradient."""
    z = logits.clone().requires_grad_()
    value = loss(z)
    value.backward()
    return value.detach(), z.grad


def golden():
    """The content of the file: tensors by key."""
    generator = torch.Generator().manual_seed(SEED)
    logits, upstream = torch.randn(2, TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    logits = 2 * logits
    bias = 0.3 * torch.randn(EXPERTS, generator=generator, dtype=torch.float64)
    out = {"logits": logits, "upstream": upstream, "bias": bias}
    for name, (kind, settings) in ROUTERS.items():
        results = routed(router_of(kind, settings, bias), logits, upstream)
        out |= {f"{name}/{key}": value for key, value in results.items()}
    for k in (1, 2, 4):
        loss, gradient = with_gradient(lambda z, k=k: load_balancing_loss_func((z,), EXPERTS, k) / k, logits)
        out |= {f"balance/{k}": loss, f"balance_gradient/{k}": gradient}
    out["z_loss"], out["z_gradient"] = with_gradient(lambda z: (torch.logsumexp(z, dim=1) ** 2).mean(), logits)
    return out


def main():
    """Write the file and list its content."""
    with doubles():
        arrays = {key: value.numpy() for key, value in golden().items()}
    assert {array.dtype.name for array in arrays.values()} == {"float64", "int64"}
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.name}: {len(arrays)} arrays, {PATH.stat().st_size} bytes, torch {torch.__version__}")


if __name__ == "__main__":
    main()
