"""A packed weight as ComfyUI carries it: comfy-kitchen's ``QuantizedTensor`` with a layout of our own.

One layout serves every format, because all of them are "codes plus a few scale tensors plus a :class:`LayerSpec`".
The layout has its own name: ComfyUI's fused helpers look for theirs and would run past our forward.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors
import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class

from ..checkpoint import LayerSpec
from ..checkpoint.layer import SCALE_SUFFIXES
from ..kernels import dequantize, int8_rows_spec, to_int8_rows
from ..kernels.spec import Spec
from .errors import QuantLoaderError

LAYOUT = "QuantLoaderPackedLayout"


@dataclasses.dataclass(frozen=True)
class Source:
    """The tensors of one layer in its file or files: what reads them again.

    ``files``: the checkpoint's files as they were when the layer was loaded; ``tensors``: (suffix, name) pairs.
    """

    files: tuple[FileState, ...]
    tensors: tuple[tuple[str, str], ...]

    def read(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor, memory-mapped.

        Raises:
            QuantLoaderError: a file is not there any more, or is not the one that was loaded.
        """
        wanted = {name: suffix for suffix, name in self.tensors}
        found: dict[str, torch.Tensor] = {}
        for state in self.files:
            if FileState.of(state.path) != state:
                raise QuantLoaderError(
                    f"{Path(state.path).name} was changed or removed after it was loaded, so the layers that were "
                    "carried over to INT8 while loading cannot be written as the file had them. Load the model again."
                )
            with safetensors.safe_open(state.path, framework="pt") as file:
                found.update({wanted[n]: file.get_tensor(n) for n in file.keys() if n in wanted})  # noqa: SIM118
        return found


class FileState(NamedTuple):
    """A file by its path, with what tells whether it is still the same: size and modification time (-1: not there)."""

    path: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> FileState:
        try:
            status = os.stat(path)
        except OSError:
            return cls(path, -1, -1)
        return cls(path, status.st_size, status.st_mtime_ns)


# A layer of one of the checkpoints that are loaded together: the checkpoint's first file, and the layer's name in it.
LayerKey: TypeAlias = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The part of a layer that is no tensor: hashable, so that ``torch.compile`` can guard on it.

    ``marker`` is the layer's ``comfy_quant`` JSON exactly as the file had it, or one written for a layer that was
    declared elsewhere (file metadata, Quanto's map). ``source``: where the layer's tensors are. ``carried``: what the
    file declares, for a weight that was carried over to INT8 rows while loading.
    """

    name: str
    format: str
    shape: tuple[int, int]
    annotations: tuple[tuple[str, Any], ...]
    declared_by: str
    marker: bytes
    source: Source | None = dataclasses.field(default=None, compare=False, repr=False)
    carried: Declaration | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, spec: LayerSpec, marker: bytes | None, source: Source | None = None) -> Declaration:
        items = tuple(sorted((k, v) for k, v in spec.annotations.items() if isinstance(v, (bool, int, float, str))))
        return cls(spec.name, spec.format, spec.shape, items, spec.declared_by, marker or marker_bytes(spec), source)

    @property
    def key(self) -> LayerKey:
        """What tells the layer from one of the same name in another checkpoint; the file is empty when not known."""
        files = self.source.files if self.source is not None else ()
        return (files[0].path if files else "", self.name)

    def spec(self, shape: tuple[int, int] | None = None) -> LayerSpec:
        """The layer as the kernels want it. ``shape``: the model's own, where the file stores more (padding)."""
        return LayerSpec(
            name=self.name,
            format=self.format,
            shape=self.shape if shape is None else shape,
            declared_by=self.declared_by,  # type: ignore[arg-type]
            annotations=dict(self.annotations),
        )


def marker_bytes(spec: LayerSpec) -> bytes:
    """A ``comfy_quant`` marker for a layer that has none in the file; Quanto is INT8 with row scales by value."""
    marker: dict[str, Any] = {"format": "int8_tensorwise" if spec.format == "quanto_int8" else spec.format}
    for key in ("convrot", "convrot_groupsize", "group_size", "linear_dtype", "full_precision_matrix_mult"):
        value = spec.get(key)
        if value not in (None, False):
            marker[key] = value
    return json.dumps(marker).encode("utf-8")


@dataclasses.dataclass(frozen=True)
class PackedParams:
    """What travels with the codes: the companion tensors (or None), the logical shape, the nominal dtype."""

    declaration: Declaration
    orig_dtype: torch.dtype
    orig_shape: tuple[int, ...]
    weight_scale: torch.Tensor | None = None
    weight_scale_2: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None
    weight_s_rel: torch.Tensor | None = None
    weight_s_channel: torch.Tensor | None = None
    weight_codebook: torch.Tensor | None = None
    weight_correction: torch.Tensor | None = None

    def _tensor_fields(self) -> list[str]:
        return [name for name in COMPANIONS if getattr(self, name) is not None]

    def companions(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor, only those the layer has."""
        return {name: getattr(self, name) for name in self._tensor_fields()}

    def to_device(self, device: torch.device) -> PackedParams:
        moved: dict[str, Any] = {k: v.to(device=device) for k, v in self.companions().items()}
        return dataclasses.replace(self, **moved)

    def clone(self) -> PackedParams:
        copied: dict[str, Any] = {k: v.clone() for k, v in self.companions().items()}
        return dataclasses.replace(self, **copied)

    def copy_from(self, src: PackedParams, non_blocking: bool = False) -> None:
        """Copy ``src``'s tensors into this object's memory (ComfyUI's offload buffers rely on it)."""
        for name, tensor in src.companions().items():
            getattr(self, name).copy_(tensor, non_blocking=non_blocking)
        for name in ("declaration", "orig_dtype", "orig_shape"):
            object.__setattr__(self, name, getattr(src, name))


# The tensors beside "weight" (the codes), by their suffix in a standard file: each is a field of PackedParams.
COMPANIONS = tuple(suffix for suffix in SCALE_SUFFIXES if suffix in PackedParams.__dataclass_fields__)


_rearranged: ContextVar[set[LayerKey] | None] = ContextVar("_rearranged", default=None)


@contextmanager
def rearranged(layers: set[LayerKey]) -> Iterator[None]:
    """Collect in ``layers`` those that are dequantised inside the block."""
    token = _rearranged.set(layers)
    try:
        yield
    finally:
        _rearranged.reset(token)


class PackedLayout(QuantizedLayout):  # type: ignore[misc]
    """The layout ComfyUI and comfy-kitchen see; the maths is in ``kernels``."""

    Params = PackedParams

    @classmethod
    def quantize(cls, tensor: torch.Tensor, **_: Any) -> tuple[torch.Tensor, PackedParams]:
        raise TypeError(
            "Quant Loader never re-quantises a weight; patches are applied beside it (docs/kernels.md, LoRA)."
        )

    @classmethod
    def dequantize(cls, qdata: torch.Tensor, params: PackedParams) -> torch.Tensor:
        """The dense weight in ``params.orig_dtype``, shape ``params.orig_shape``."""
        layers = _rearranged.get()
        if layers is not None:
            layers.add(params.declaration.key)
        tensors = {"weight": qdata, **params.companions()}
        return dense_weight(params.declaration.spec(), tensors, params.orig_shape).to(params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor: Any) -> tuple[torch.Tensor, ...]:
        return (qtensor._qdata, *qtensor._params.companions().values())

    @classmethod
    def state_dict_tensors(cls, qdata: torch.Tensor, params: PackedParams) -> dict[str, torch.Tensor]:
        """Suffixes after ``<layer>.weight``; the ones that are not ``weight*`` are written by the module."""
        out = {"": qdata}
        out.update({k[len("weight") :]: v for k, v in params.companions().items() if k.startswith("weight")})
        return out


register_layout_class(LAYOUT, PackedLayout)


def pack(
    spec: LayerSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    marker: bytes | None = None,
    shape: tuple[int, ...] | None = None,
    source: Source | None = None,
) -> Any:
    """One ``QuantizedTensor`` of logical ``shape`` (default ``spec.shape``) from a layer's tensors by suffix.

    No byte is copied: the codes stay the memory-mapped tensor that the file reader gave.
    """
    companions = {k: as_stored(v) for k, v in tensors.items() if k in COMPANIONS}
    params = PackedParams(Declaration.of(spec, marker, source), dtype, shape or spec.shape, **companions)
    return QuantizedTensor(as_stored(tensors["weight"]), LAYOUT, params)


def carried(weight: Any, device: torch.device) -> Any:
    """A packed weight as INT8 rows with ConvRot where the weight is; ``device`` does the work.

    Its declaration remembers the one of the file, which saving goes back to.
    """
    params = weight._params
    original = params.declaration
    spec = original.spec()
    rows = to_int8_rows(spec, plain_tensors(weight), device)
    found = Declaration.of(int8_rows_spec(spec, rows.group), None, original.source)
    made = PackedParams(
        dataclasses.replace(found, carried=original),
        params.orig_dtype,
        params.orig_shape,
        weight_scale=rows.scale.to(weight._qdata.device),
    )
    return type(weight)(rows.qweight.to(weight._qdata.device), LAYOUT, made)


def as_in_file(weight: Any) -> Any:
    """The packed weight that the file holds: read again for one that was carried over, else ``weight`` itself."""
    original = weight._params.declaration.carried
    if original is None:
        return weight
    return pack(
        original.spec(),
        original.source.read(),
        weight._params.orig_dtype,
        original.marker,
        weight._params.orig_shape,
        original.source,
    )


def parameter(weight: Any) -> torch.nn.Parameter:
    """``weight`` as a parameter of a module, sharing its tensors.

    Making a parameter detaches the tensor, and comfy-kitchen's detach copies the scales: a tenth of a 4-bit model, and
    a tenth of the time of a load. A packed weight is marked as a parameter instead, as torch marks a detached subclass.
    """
    if not is_packed(weight):
        return torch.nn.Parameter(weight, requires_grad=False)
    made = type(weight)(weight._qdata, LAYOUT, weight._params)
    made._is_param = True
    assert isinstance(made, torch.nn.Parameter)
    return made


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """E8M0 as its bytes: the dtype is unknown to parts of ComfyUI and has no arithmetic anyway."""
    if tensor.dtype == getattr(torch, "float8_e8m0fnu", None):
        return tensor.view(torch.uint8)
    return tensor


def is_packed(tensor: Any) -> bool:
    """Whether a weight is one of ours."""
    return isinstance(tensor, QuantizedTensor) and tensor._layout_cls == LAYOUT


def dense_weight(spec: Spec | None, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The float32 weight of ``shape`` that acts on the layer's own input.

    A format's padding is cut off, and smoothing (``pre_quant_scale``, which multiplies the input) is folded in.
    """
    assert spec is not None
    dense = dequantize(spec, tensors)
    smooth = tensors.get("pre_quant_scale")
    if smooth is not None:
        dense = dense[:, : smooth.numel()] * smooth.to(torch.float32).flatten()
    rows, columns = shape[0], math.prod(shape[1:])
    return dense[:rows, :columns].reshape(shape)


def plain_tensors(weight: Any) -> dict[str, torch.Tensor]:
    """Suffix -> tensor of a packed weight, on the device where it is."""
    return {"weight": weight._qdata, **weight._params.companions()}
