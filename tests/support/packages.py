"""Packages that look installed to Python."""

from __future__ import annotations

from pathlib import Path


def write_package(folder: Path, name: str, group: str, entry_points: dict[str, str]) -> None:
    """Writes what pip notes of a package with these entry points of a group: it is installed where the folder is on
    the search path."""
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"{key} = {target}\n" for key, target in entry_points.items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")
