"""Sharding strategies, a page each: hand-written einsums with every collective in plain sight."""

from spmd_engine.strategies.data_parallel import DataParallel
from spmd_engine.strategies.single_device import SingleDevice
from spmd_engine.strategies.tensor_parallel import TensorParallel

__all__ = ["DataParallel", "SingleDevice", "TensorParallel"]
