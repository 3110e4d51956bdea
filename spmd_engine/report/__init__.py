"""A run's report: one HTML file that needs no network."""

from spmd_engine.report.page import page_of
from spmd_engine.report.run_record import RunRecord

__all__ = ["RunRecord", "page_of"]
