"""The report of a job: one HTML file that opens from disk, without a server and without a network."""

from jobs.report.report import ReportOptions, ReportResult, default_place, write_report

__all__ = ["ReportOptions", "ReportResult", "default_place", "write_report"]
