"""Runs decoding, prefill and fine-tuning with the engine: a worker of `bench_decoding.py`. Ranks are along `model`."""

import sys

from decoding_protocol import ALPHA, LONG, NEW, PROMPT, RANK, TRAIN, measure, tokens

from spmd_engine import Mesh
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.comm.world import world
from spmd_engine.engine import AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.serving import StoppingCriteria, generate
from spmd_engine.serving.generation import NextTokens, call
from spmd_engine.serving.sampling import SamplingOptions


def main() -> None:
    ranks = world().size
    with Mesh(**({"model": ranks} if ranks > 1 else {"data": 1})) as mesh:
        engine, _ = open_pretrained(ModelConfig(sys.argv[1]), mesh)
        vocabulary = engine.model.vocabulary

        def write(batch):
            prompts = tokens(batch, PROMPT, vocabulary).tolist()
            return lambda: generate(engine, prompts, stopping=StoppingCriteria(NEW))

        def read(length):
            text = tokens(1, length, vocabulary)[0].tolist()

            def step():
                with engine.inference():
                    NextTokens(engine, SamplingOptions()).forward(call([(0, 0, 0, 0, text)]))

            return step

        def train(engine):
            optimizer = AdamW()
            batch = batch_of(*tokens(2 * TRAIN[0], TRAIN[1], vocabulary).reshape(2, *TRAIN), engine)

            def step():
                engine.step(batch)
                optimizer.update(engine, engine.gradients, step=1, rate=1e-5)

            return step

        def adapted():
            model = ModelConfig(sys.argv[1], lora=LoRAOptions(RANK, ALPHA))
            return open_pretrained(model, mesh)[0]

        steps = {
            "memory": lambda: read(128), "batch 1": lambda: write(1), "batch 8": lambda: write(8),
            "prefill": lambda: read(LONG), "train": lambda: train(engine), "adapters": lambda: train(adapted()),
            "clock": lambda: write(1),
        }  # fmt: skip
        measure(steps, report=mesh.rank == 0)


if __name__ == "__main__":
    main()
