"""Datasets made of finished jobs: one function, one module for each format."""

from jobs.export.destination import own_output
from jobs.export.export import FORMATS, PART_BYTES, ExportReport, export
from jobs.export.plan import Splits, parse_splits

__all__ = ["FORMATS", "PART_BYTES", "ExportReport", "Splits", "export", "own_output", "parse_splits"]
