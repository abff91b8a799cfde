"""Exports of jobs as datasets, and the interface for formats of other packages."""

from jobs.export.dataset import PartFiles
from jobs.export.export import ExportReport, checked_format, export_jobs, parsed_options
from jobs.export.files import own_output
from jobs.export.formats import ExportFormat, ExportOptions, find_format, format_names
from jobs.export.items import AudioItem, Part, item_metadata, parse_splits
from jobs.store import StoredJob

__all__ = [
    "AudioItem",
    "ExportFormat",
    "ExportOptions",
    "ExportReport",
    "Part",
    "PartFiles",
    "StoredJob",
    "checked_format",
    "export_jobs",
    "find_format",
    "format_names",
    "item_metadata",
    "own_output",
    "parse_splits",
    "parsed_options",
]
