"""Training: jobs and their runs, data, and the loop."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.training.data.array_data import ArrayData
    from spmd_engine.training.data.corpus import Corpus, load_corpus
    from spmd_engine.training.data.images import ImageData, Images, load_images
    from spmd_engine.training.data.prepare import prepare
    from spmd_engine.training.data.token_data import PreparedData
    from spmd_engine.training.hooks import Hook
    from spmd_engine.training.observers import Observer
    from spmd_engine.training.run import Run
    from spmd_engine.training.run_folder import read_run
    from spmd_engine.training.train_config import TrainConfig
    from spmd_engine.training.trainer import Trainer

__all__ = [
    "ArrayData",
    "Corpus",
    "Hook",
    "ImageData",
    "Images",
    "Observer",
    "PreparedData",
    "Run",
    "TrainConfig",
    "Trainer",
    "load_corpus",
    "load_images",
    "prepare",
    "read_run",
]

__getattr__ = imported_when_asked(__name__)
