"""What a checkpoint file says: header, declarations, rules, report. Standard library and numpy only."""

from .report import Fault, Group, LayerSpec, Report

__all__ = ["Fault", "Group", "LayerSpec", "Report"]
