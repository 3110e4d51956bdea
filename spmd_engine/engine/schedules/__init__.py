"""Schedules as data: what each stage does with its micro-batches, in order. An engine executes them."""

from spmd_engine.engine.schedules.drawing import draw_schedule
from spmd_engine.engine.schedules.orders import SCHEDULES, named
from spmd_engine.engine.schedules.schedule import Schedule

Schedule.picture = draw_schedule

__all__ = ["SCHEDULES", "Schedule", "named"]
