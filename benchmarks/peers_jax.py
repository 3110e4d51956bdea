"""JAX on several host devices of one process, data parallel: a worker of `bench_peers.py`.

One jitted function is the whole step: XLA fuses it and inserts the all-reduces. The batch is sharded over the devices;
parameters and optimizer state are replicated, and donated, so that they are updated in place. XLA makes the devices of
one process from `--xla_force_host_platform_device_count`. Each computes on one thread
(`--xla_cpu_multi_thread_eigen=false`), like the ranks of the other sides; with `"multi_threaded": true` in the
configuration they share a pool of one thread per core. Layers are unrolled, because XLA's CPU backend runs them faster
than a scan. The peak memory is that of the process divided by the devices, and includes compilation.
"""

import os
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from peers_protocol import make_batches, print_result, read_config, time_steps


def initial_parameters(config):
    """GPT-2's initial values."""
    random = np.random.default_rng(config["seed"])
    width, out = config["width"], 0.02 / sqrt(2 * config["layers"])

    def normal(*shape, std=0.02):
        return std * random.standard_normal(shape, np.float32)

    def affine(inputs, outputs, std=0.02):
        return {"weight": normal(inputs, outputs, std=std), "bias": np.zeros(outputs, np.float32)}

    def norm():
        return {"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)}

    blocks = [
        {
            "attention_norm": norm(),
            "qkv": affine(width, 3 * width),
            "output": affine(width, width, out),
            "mlp_norm": norm(),
            "up": affine(width, 4 * width),
            "down": affine(4 * width, width, out),
        }
        for _ in range(config["layers"])
    ]
    return {
        "embedding": normal(config["vocabulary"], width),
        "positions": normal(config["context"], width),
        "blocks": blocks,
        "norm": norm(),
    }


def affine(p, x):
    return x @ p["weight"] + p["bias"]


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


def attention(p, x, heads):
    """x[b s d]: causal, of the normed input."""
    b, s, d = x.shape
    parts = jnp.split(affine(p["qkv"], layer_norm(p["attention_norm"], x)), 3, axis=-1)
    q, k, v = (part.reshape(b, s, heads, d // heads) for part in parts)
    return affine(p["output"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, d))


def mean_loss(p, tokens, targets, heads):
    """The mean cross-entropy of tokens[b s] at targets[b s]."""
    x = p["embedding"][tokens] + p["positions"][: tokens.shape[1]]
    for block in p["blocks"]:
        x = x + attention(block, x, heads)
        x = x + affine(block["down"], jax.nn.gelu(affine(block["up"], layer_norm(block["mlp_norm"], x))))
    logits = layer_norm(p["norm"], x) @ p["embedding"].T
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - of_target).mean()


def make_update(config):
    """The whole step, (parameters, means, squares, number of the step) -> (the same, updated; loss)."""
    beta1, beta2 = config["betas"]
    rate, decay, epsilon = config["learning_rate"], config["weight_decay"], config["epsilon"]

    def update(state, tokens, targets):
        parameters, means, squares, number = state
        loss, gradients = jax.value_and_grad(mean_loss)(parameters, tokens, targets, config["heads"])
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
        scale = jnp.minimum(1.0, config["clip_norm"] / (norm + 1e-6))
        number = number + 1

        def adamw(p, m, v, g):
            g = g * scale
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            change = (m / (1 - beta1**number)) / (jnp.sqrt(v / (1 - beta2**number)) + epsilon)
            return p - rate * (change + (decay if p.ndim > 1 else 0.0) * p), m, v

        new = jax.tree.map(adamw, parameters, means, squares, gradients)
        parameters, means, squares = jax.tree.transpose(
            jax.tree.structure(parameters), jax.tree.structure((0, 0, 0)), new
        )
        return (parameters, means, squares, number), loss

    return update


def main():
    config = read_config()
    flags = [f"--xla_force_host_platform_device_count={config['ranks']}"]
    if not config.get("multi_threaded"):
        flags.append("--xla_cpu_multi_thread_eigen=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)  # read when the devices are first used
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    parameters = initial_parameters(config)
    zeros = jax.tree.map(np.zeros_like, parameters)
    state = jax.device_put((parameters, zeros, zeros, np.float32(0)), replicated)
    batches = [jax.device_put([part.astype(np.int32) for part in batch], sharded) for batch in make_batches(config)]
    update = jax.jit(make_update(config), donate_argnums=0, out_shardings=(replicated, replicated))

    def step(index):
        nonlocal state
        state, loss = update(state, *batches[index])
        value = float(loss)
        jax.block_until_ready(state)
        return value

    row = time_steps(config, step)
    row[2] /= config["ranks"]
    print_result(config, row[None], f"JAX {jax.__version__}")


if __name__ == "__main__":
    main()
