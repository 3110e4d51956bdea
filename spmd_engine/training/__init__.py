"""Training: jobs and their runs, data, and the loop."""

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
