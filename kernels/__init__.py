"""y = x W^T + b for packed W: reference maths, operators and the dispatcher.

>>> operation = prepare(spec, device_facts("cuda"), "auto")   # once per layer
>>> y = operation(x, tensors, bias)                            # per call; operation.plan says what runs and why

See ``docs/kernels.md`` for the whole story, ``formats/<format>.py`` for one format's.
"""

from __future__ import annotations

from .dispatch import PreparedLinear, dequantize, embedding, linear, prepare, reference_linear, to_int8_rows
from .facts import DEVICES, ENVIRONMENT_VARIABLE, DeviceFacts, device_facts
from .formats import FORMATS
from .formats.int8_rows import Int8Rows, int8_rows_spec
from .planning import MODES, Alternative, Mode, Plan, plan
from .retire import calls, retired

__all__ = [
    "DEVICES",
    "ENVIRONMENT_VARIABLE",
    "FORMATS",
    "MODES",
    "Alternative",
    "DeviceFacts",
    "Int8Rows",
    "Mode",
    "Plan",
    "PreparedLinear",
    "calls",
    "dequantize",
    "device_facts",
    "embedding",
    "int8_rows_spec",
    "linear",
    "plan",
    "prepare",
    "reference_linear",
    "retired",
    "to_int8_rows",
]
