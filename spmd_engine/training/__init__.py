"""Training: jobs and their runs, data, and the loop."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.training.array_data import ArrayData
    from spmd_engine.training.data import Corpus, load_corpus
    from spmd_engine.training.images import ImageData, Images, load_images
    from spmd_engine.training.job import Job
    from spmd_engine.training.observers import Observer
    from spmd_engine.training.run import Run
    from spmd_engine.training.start import train
    from spmd_engine.training.trainer import Trainer

__all__ = [
    "ArrayData",
    "Corpus",
    "ImageData",
    "Images",
    "Job",
    "Observer",
    "Run",
    "Trainer",
    "load_corpus",
    "load_images",
    "train",
]

_PUBLIC = {
    "array_data": ("ArrayData",),
    "data": ("Corpus", "load_corpus"),
    "images": ("ImageData", "Images", "load_images"),
    "job": ("Job",),
    "observers": ("Observer",),
    "run": ("Run",),
    "start": ("train",),
    "trainer": ("Trainer",),
}
__getattr__ = imported_when_asked(__name__, _PUBLIC)
