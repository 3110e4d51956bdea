"""Training: data, the loop, checkpoints and text from a trained model."""

from spmd_engine.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from spmd_engine.training.data import Corpus, load_corpus
from spmd_engine.training.generate import generate
from spmd_engine.training.trainer import Trainer

__all__ = ["Checkpoint", "Corpus", "Trainer", "generate", "load_checkpoint", "load_corpus", "save_checkpoint"]
