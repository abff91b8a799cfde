"""The measured choice of kernels by number of rows (H200; `benchmarks/NOTES.md` holds the figures)."""

from __future__ import annotations

from kernels.lm_frame import Plan


def plan_for(rows: int, hidden: int = 1024) -> Plan:
    """The plan for frames of `rows` rows of a talker of width `hidden`."""
    if rows <= 16:
        return Plan(skinny_rows=64)
    if rows <= 32 and hidden <= 1024:
        return Plan(skinny_rows=64, norm_apart_rows=1, ahead=2)
    return Plan(skinny_rows=0, pdl=False)
