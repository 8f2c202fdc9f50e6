"""What a checkpoint file says: header, declarations, rules, report. Standard library and numpy only."""

from .catalogue import RULES, Rule
from .checker import check
from .files import Checkpoint, open_checkpoint, shard_paths
from .header import Header, HeaderError, TensorInfo, read_header, read_tensor
from .report import Fault, Group, LayerSpec, Report
from .summary import verdict_text

__all__ = [
    "RULES",
    "Checkpoint",
    "Fault",
    "Group",
    "Header",
    "HeaderError",
    "LayerSpec",
    "Report",
    "Rule",
    "TensorInfo",
    "check",
    "open_checkpoint",
    "read_header",
    "read_tensor",
    "shard_paths",
    "verdict_text",
]
