"""Our steps of a ResNet-18: a worker of `bench_peers.py`. `peers_images.py` defines a step."""

from time import process_time

from bench_worker_ours import version
from peers_images import make_images
from peers_protocol import print_result, read_config, time_steps

from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.engine import SGD, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.models import ImageShape, build_model
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.training.trainer import Trainer


def main() -> None:
    config = read_config()
    of = config["images"]
    keep_freed_memory()  # as `train` does
    shape = ImageShape(of["length"], of["length"], of["channels"], of["classes"])
    precision = config.get("precision", "float32")
    engine = LayeredEngine(build_model("resnet18", sample=shape), seed=config["seed"], dtype=precision)
    choose_products(engine.mesh.group(), config.get("products", "auto"), dtype=precision)
    batch = batch_of(*make_images(config), engine)
    trainer = Trainer(
        engine,
        SGD(momentum=config["momentum"]),
        lambda step: batch,
        lambda step: config["learning_rate"],
        step_metrics=False,
    )
    print_result(config, [time_steps(config, lambda step: trainer.step().loss, clock=process_time)], version())


if __name__ == "__main__":
    main()
