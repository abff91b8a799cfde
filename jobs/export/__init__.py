"""Datasets made of finished jobs: one function, the formats by their kind, and what a format of another
package needs."""

from jobs.export.export import PART_BYTES, ExportReport, export
from jobs.export.files import PartFiles, own_output
from jobs.export.formats import ExportFormat, find_format, format_names
from jobs.export.items import AudioItem, ItemMetadata, LeftOut, Part, Splits, item_metadata, parse_splits

__all__ = [
    "PART_BYTES",
    "AudioItem",
    "ExportFormat",
    "ExportReport",
    "ItemMetadata",
    "LeftOut",
    "Part",
    "PartFiles",
    "Splits",
    "export",
    "find_format",
    "format_names",
    "item_metadata",
    "own_output",
    "parse_splits",
]
