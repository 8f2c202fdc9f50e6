"""The operations class a model is built with: ComfyUI's ``manual_cast``, whose linears and embeddings may be packed.

A layer that the file does not quantise behaves as ComfyUI's own. A packed weight on a module that has no kernel (a
convolution, a norm) is dequantised while loading, never value-cast, and listed in the context.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import comfy.model_management
import comfy.ops
import torch

from ..checkpoint import LayerSpec
from ..kernels import FORMATS, DeviceFacts, Mode, Plan, PreparedLinear, device_facts, embedding, plan
from . import guard
from .errors import ModelMismatch
from .kept_rows import KeptRows, keep, too_little_memory
from .packed import LAYOUT, LayerKey, as_stored, carried, dense_weight, is_packed, parameter, plain_tensors
from .progress import Progress
from .sidepath import SidePath

_manual_cast: Any = comfy.ops.manual_cast

# What a layer can do instead of calling its kernel; the keys of ``dense_calls``.
PATCHED = "patched dequantised copy"
DENSE = "dense copy from ComfyUI"
LOOKUP = "row lookup"


class Given(NamedTuple):
    """Which of a module's parameters, ``<prefix><name>`` in the file, are there and which are not."""

    prefix: str
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()


@dataclass
class LoadContext:
    """What one load learns; shared by all modules of the model that is being built.

    ``consumed``: packed layers that a module took. ``dequantised``: name -> why a layer has no kernel. ``mismatches``:
    layer -> a sentence, for those whose shape the model disagrees with. ``warnings``: what loading gave reason to say.
    ``guarded``: weight key -> what the output guards last said of the layer, and the patches it ran with. ``hooked``:
    weight key -> how the LoRAs of hooks were applied in the last run. ``progress`` takes a step for each layer, and
    with it the interrupt. ``rearranged``: layers that ComfyUI took apart while loading (a transposed, split or
    concatenated weight), which dequantises them. ``incomplete``: whether a module found one of its parameters missing
    in the file. Layers go by file and name: two encoders may share names.
    """

    execution: Mode = "auto"
    progress: Progress | None = None
    consumed: set[LayerKey] = field(default_factory=set)
    rearranged: set[LayerKey] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    guarded: dict[str, tuple[str, uuid.UUID | None]] = field(default_factory=dict)
    hooked: dict[str, str] = field(default_factory=dict)
    dequantised: dict[str, str] = field(default_factory=dict)
    mismatches: dict[LayerKey, str] = field(default_factory=dict)
    incomplete: bool = False
    _facts: dict[torch.device, DeviceFacts] = field(default_factory=dict)
    _plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)

    def plan(self, spec: LayerSpec, device: torch.device) -> Plan:
        """What runs a layer on a device: decided once for all layers of one kind."""
        if device not in self._facts:
            self._facts[device] = device_facts(device)
        key = (device, spec.format, spec.shape, *sorted(spec.annotations.items()))
        if key not in self._plans:
            self._plans[key] = plan(spec, self._facts[device], self.execution)
        return self._plans[key]

    def sentences(self) -> list[str]:
        """All warnings that stand: of the load, and of layers whose last run was not right."""
        return [*self.warnings, *(sentence for sentence, _ in self.guarded.values())]

    def note(self, module: torch.nn.Module, prefix: str, names: Sequence[str], state_dict: Collection[str]) -> None:
        """Keep with ``module`` which of its parameters ``names`` are in the file."""
        given = Given(prefix, tuple(n for n in names if f"{prefix}{n}" in state_dict))
        given = given._replace(absent=tuple(n for n in names if n not in given.present))
        module.__dict__["given"] = given
        self.incomplete = self.incomplete or bool(given.absent)


class _Packable:
    """What packed linears and embeddings share: loading, saving, moving, the prepared kernel."""

    # Whether the weight is looked up by rows instead of multiplied.
    is_table = False

    context: LoadContext
    module_dtype: torch.dtype
    weight: Any
    bias: Any
    spec: LayerSpec | None
    side_path: SidePath | None
    guard: guard.OutputGuard
    # What ran instead of the kernel (keys: the names in kernel_report), outside compiled graphs.
    dense_calls: Counter[str]
    # INT8 rows beside the weight, and why there are none where there should be.
    # The weight's name where the file has none: an error once something reads it. Whoever knows that nobody reads the
    # result sets it to None.
    lacking: str | None
    kept: KeptRows | None
    not_kept: str
    _operators: dict[tuple[str, int | None], Any]

    def _init_packable(self, context: LoadContext, dtype: torch.dtype | None) -> None:
        # Past torch's __setattr__, which looks for parameters and modules in each of them: a twentieth of a load.
        self.__dict__.update(
            context=context,
            module_dtype=dtype if dtype is not None else torch.get_default_dtype(),
            weight_comfy_model_dtype=dtype,
            bias_comfy_model_dtype=dtype,
            spec=None,
            side_path=None,
            guard=guard.OutputGuard(),
            dense_calls=Counter(),
            lacking=None,
            kept=None,
            not_kept="",
            _operators={},
        )

    def _take(self, weight: Any, module_shape: tuple[int, ...]) -> None:
        """Adopt a packed weight, or note that it does not fit ``module_shape``."""
        if self.context.progress is not None:
            self.context.progress.step()
        declaration = weight._params.declaration
        if not _fits(declaration.shape, module_shape, declaration.format):
            self.context.mismatches[declaration.key] = (
                f"the file holds {_dims(declaration.shape)} ({declaration.format}), "
                f"the model's layer is {_dims(module_shape)}"
            )
            return
        # A server that stores weights in 8 bits (--fp8_e4m3fn-unet) is told about packed ones in the file's own dtype:
        # what is dequantised is not rounded to 8 bits.
        dtype = self.module_dtype if self.module_dtype.itemsize > 1 else weight._params.orig_dtype
        params = dataclasses.replace(weight._params, orig_shape=tuple(module_shape), orig_dtype=dtype)
        self.weight = parameter(type(weight)(weight._qdata, LAYOUT, params))
        # The kernels cut and pad what the file stores beyond the model's own shape.
        self.spec = declaration.spec((module_shape[0], module_shape[1]))
        self.kept = None
        self.context.consumed.add(declaration.key)

    @property
    def file_format(self) -> str:
        """The format that the file declares, whatever the weight has become."""
        assert self.spec is not None
        original = self.weight._params.declaration.carried if is_packed(self.weight) else None
        return self.spec.format if original is None else str(original.format)

    def carries(self, device: torch.device) -> bool:
        """Whether the kernel on ``device`` would carry the weight over to INT8 rows on every call.

        Codes that fit into INT8 as they are cost little to unpack; smoothing is no part of an INT8 layer.
        """
        if self.spec is None or self.is_table or FORMATS[self.spec.format].has_int8_codes:
            return False
        smooth = self.weight._params.pre_quant_scale is not None
        return not smooth and self.operator(device).plan.execution == "int8"

    def carry_over(self, device: torch.device) -> None:
        """Replace the weight by its INT8 rows, and with it the kernel."""
        weight = carried(self.weight, device)
        self.weight = parameter(weight)
        assert self.spec is not None
        self.spec = weight._params.declaration.spec(self.spec.shape)
        self._operators.clear()

    def keeps(self, device: torch.device) -> bool:
        """Whether INT8 rows are kept beside the weight from the first call on, memory allowing."""
        return device.type == "cpu" and self.carries(device)

    def rows(self, weight: Any, device: torch.device) -> KeptRows | None:
        """The kept INT8 rows of ``weight``, made at the first call; None where the kernel takes the weight itself."""
        if self.kept is None and self.spec is not None and not torch.compiler.is_compiling() and self.keeps(device):
            self.not_kept = too_little_memory(self.spec, device)
            if not self.not_kept:
                planned = functools.partial(self.context.plan, device=device)
                self.kept = keep(self.spec, plain_tensors(weight), planned)
        return self.kept if device.type == "cpu" else None

    def operator(self, device: torch.device) -> Any:
        """The kernel of this layer on ``device``, chosen once."""
        key = (device.type, device.index)
        found = self._operators.get(key)
        if found is None:
            assert self.spec is not None
            found = self._operators[key] = PreparedLinear(self.spec, self.context.plan(self.spec, device))
        return found

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose the kernel and move the LoRAs' matrices before the first call, whose input is of ``dtype``."""
        if not self.is_table:
            self.operator(device)
            if self.side_path is None or not self.side_path.exact:
                self.rows(self.weight, device)
        if self.side_path is not None:
            self.side_path.prepare(device, dtype)

    def _count(self, what: str) -> None:
        if not torch.compiler.is_compiling():
            self.dense_calls[what] += 1

    def operators(self) -> tuple[Any, ...]:
        """Every kernel this layer was prepared for, for the report."""
        return (*self._operators.values(), *(() if self.kept is None else (self.kept.operator,)))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``Module._apply`` that rebuilds parameters, because a wrapper tensor has no ``.data`` to swap."""
        for key, param in self._parameters.items():  # type: ignore[attr-defined]
            if param is None:
                continue
            moved = fn(param)
            if not torch.is_inference_mode_enabled() and moved.is_inference():
                moved = moved.clone()
            self.register_parameter(key, parameter(moved))  # type: ignore[attr-defined]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A module of its own that shares the packed weight, which is never written to (torch cannot copy it).

        ComfyUI copies ControlNets so, one for each of several GPUs.
        """
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        shared = [self.context, *(p for p in self._parameters.values() if is_packed(p))]  # type: ignore[attr-defined]
        memo.update({id(one): one for one in shared})
        made.__dict__.update(copy.deepcopy({**self.__dict__, "kept": None, "side_path": None}, memo))
        return made

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """Codes, scales and marker as in the file; a plain layer as torch writes it."""
        if not is_packed(self.weight):
            return super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)  # type: ignore[misc]
        out = destination if destination is not None else {}
        if self.bias is not None:
            out[f"{prefix}bias"] = self.bias
        params = self.weight._params
        out[f"{prefix}weight"] = self.weight._qdata
        for suffix, tensor in params.companions().items():
            out[f"{prefix}{suffix}"] = tensor
        out[f"{prefix}comfy_quant"] = torch.frombuffer(bytearray(params.declaration.marker), dtype=torch.uint8)
        return out

    def extra_state_suffixes(self) -> tuple[str, ...]:
        """What a packed weight writes beside ``weight``."""
        return (*self.weight._params.companions(), "comfy_quant") if is_packed(self.weight) else ()

    def _dense(self, weight: Any) -> torch.Tensor:
        """A float32 copy of the weight that acts on the layer's own input, for patches that change it in place."""
        if is_packed(weight):
            return dense_weight(self.spec, plain_tensors(weight), weight._params.orig_shape)
        return weight.to(torch.float32, copy=True)  # type: ignore[no-any-return]

    def convert_weight(self, weight: Any, inplace: bool = False, **_: Any) -> Any:
        """Dense values of a weight, for ComfyUI's merging and for extensions that ask."""
        return weight.dequantize() if is_packed(weight) else weight


def _lacking(name: str) -> str:
    return (
        f"The file has no {name}, which this model needs; without it the picture would be wrong. The file is "
        "incomplete: download it again, or convert it again from the original."
    )


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(str(s) for s in shape)


def _fits(stored: tuple[int, int], wanted: tuple[int, ...], fmt: str) -> bool:
    """Equal shapes, or the padding that the block formats are written with (rows to 16 / 32, columns to a block)."""
    if len(wanted) != 2:
        return False
    if stored == tuple(wanted):
        return True
    multiple = {"nvfp4": 16, "mxfp8": 32}.get(fmt)
    if multiple is None:
        return False
    return all(-(-size // multiple) * multiple == have for have, size in zip(stored, wanted, strict=True))


def operations(context: LoadContext) -> Any:
    """An operations class for one model; ``context`` collects what loading finds."""

    class QuantLoaderOps(_manual_cast):  # type: ignore[misc]
        class Linear(_Packable, _manual_cast.Linear):  # type: ignore[misc]
            """``y = x W^T + b`` on packed or plain weights."""

            def __init__(
                self,
                in_features: int,
                out_features: int,
                bias: bool = True,
                device: Any = None,
                dtype: torch.dtype | None = None,
            ) -> None:
                # No memory for a weight that the file brings: a 20 GB model would otherwise be reserved twice.
                torch.nn.Module.__init__(self)
                self.in_features = in_features
                self.out_features = out_features
                self.weight = None
                self.bias = None
                self.has_bias = bias
                self.weight_function: list[Any] = []
                self.bias_function: list[Any] = []
                self._init_packable(context, dtype)

            def _load_from_state_dict(
                self,
                state_dict: dict[str, Any],
                prefix: str,
                local_metadata: Any,
                strict: bool,
                missing_keys: list[str],
                unexpected_keys: list[str],
                error_msgs: list[str],
            ) -> None:
                shape = (self.out_features, self.in_features)
                context.note(self, prefix, ("weight", "bias") if self.has_bias else ("weight",), state_dict)
                weight = state_dict.get(f"{prefix}weight")
                self.lacking = None
                if weight is None:
                    # Some families lack a projection that nothing reads; it is an error once something does.
                    missing_keys.append(f"{prefix}weight")
                    self.lacking = f"{prefix}weight"
                    self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=self.module_dtype), requires_grad=False)
                elif is_packed(weight):
                    self._take(weight, shape)
                elif f"{prefix}comfy_quant" in state_dict:
                    error_msgs.append(f"{prefix}weight holds the codes of a quantised layer, which are no weights")
                elif tuple(weight.shape) != shape:
                    error_msgs.append(f"{prefix}weight is {tuple(weight.shape)} in the file, {shape} in the model")
                else:
                    self.weight = torch.nn.Parameter(_plain(weight, self.module_dtype), requires_grad=False)
                bias = state_dict.get(f"{prefix}bias")
                if bias is not None and self.has_bias:
                    if tuple(bias.shape) == (self.out_features,):
                        self.bias = torch.nn.Parameter(_plain(bias, self.module_dtype), requires_grad=False)
                    elif self.spec is not None or not is_packed(weight):  # else the weight's misfit is told by name
                        error_msgs.append(
                            f"{prefix}bias is {tuple(bias.shape)} in the file, ({self.out_features},) in the model"
                        )
                elif bias is not None:
                    unexpected_keys.append(f"{prefix}bias")
                elif self.has_bias:
                    missing_keys.append(f"{prefix}bias")
                    zeros = torch.zeros(self.out_features, dtype=self.module_dtype)
                    self.bias = torch.nn.Parameter(zeros, requires_grad=False)

            def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if self.spec is None:
                    if self.lacking is not None:
                        raise ModelMismatch(_lacking(self.lacking))
                    dense: torch.Tensor = super().forward(input, *args, **kwargs)
                    return dense
                comfy.ops.run_every_op()
                weight, bias, stream = comfy.ops.cast_bias_weight(
                    self,
                    dtype=self.weight.dtype,
                    device=input.device,
                    bias_dtype=input.dtype,
                    offloadable=True,
                    compute_dtype=input.dtype,
                )
                output = self._linear(input, weight, bias)
                if guard.ENABLED:
                    self.guard.observe(output)
                comfy.ops.uncast_bias_weight(self, weight, bias, stream)
                return output

            def _linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
                side = self.side_path
                low_rank, up = side.whole(x) if side is not None else (None, None)
                if (side is not None and side.exact) or not is_packed(weight):
                    # Not packed: ComfyUI handed a dense copy (a weight wrapper, or a layer forced to the CPU).
                    dense = self._dense(weight)
                    if side is not None and side.exact:
                        dense = side.patch(dense)
                        self._count(PATCHED)
                    else:
                        self._count(DENSE)
                    y = torch.nn.functional.linear(x, dense.to(x.dtype), bias)
                    if low_rank is not None and up is not None:
                        y = y + torch.nn.functional.linear(low_rank, up)
                else:
                    rows = self.rows(weight, x.device)
                    if rows is None:
                        y = self.operator(x.device)(x, plain_tensors(weight), bias, low_rank, up)
                    else:
                        y = rows.operator(x, rows.tensors, bias, low_rank, up)
                return y if side is None else side.add_parts(x, y)

        class Embedding(_Packable, _manual_cast.Embedding):  # type: ignore[misc]
            """Row lookup in a packed or plain table."""

            is_table = True

            def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
                super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
                self._init_packable(context, kwargs.get("dtype"))

            def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
                context.note(self, prefix, ("weight",), state_dict)
                weight = state_dict.get(f"{prefix}weight")
                self.lacking = f"{prefix}weight" if weight is None else None
                if not is_packed(weight):
                    super()._load_from_state_dict(state_dict, prefix, *rest)
                    return
                self._take(weight, (self.num_embeddings, self.embedding_dim))
                self.bias = None

            def forward(self, input: torch.Tensor, *args: Any, out_dtype: Any = None, **kwargs: Any) -> torch.Tensor:
                if self.spec is None:
                    if self.lacking is not None:
                        raise ModelMismatch(_lacking(self.lacking))
                    dense: torch.Tensor = super().forward(input, *args, out_dtype=out_dtype, **kwargs)
                    return dense
                comfy.ops.run_every_op()
                weight, bias, stream = comfy.ops.cast_bias_weight(
                    self, dtype=self.weight.dtype, device=input.device, bias_dtype=self.weight.dtype, offloadable=True
                )
                rows = self._rows(input, weight)
                comfy.ops.uncast_bias_weight(self, weight, bias, stream)
                return rows.to(out_dtype if out_dtype is not None else self.weight.dtype)

            def _rows(self, ids: torch.Tensor, weight: Any) -> torch.Tensor:
                side = self.side_path
                self._count(LOOKUP)
                if side is not None and (side.exact or side.fused):
                    return torch.nn.functional.embedding(ids, side.patch(self._dense(weight)))
                if is_packed(weight) and self.spec is not None:
                    rows = embedding(ids, self.spec, plain_tensors(weight))[..., : self.embedding_dim]
                else:
                    rows = torch.nn.functional.embedding(ids, weight)
                return rows if side is None else side.add_rows(ids, rows)

    for name in dir(_manual_cast):
        base = getattr(_manual_cast, name)
        if isinstance(base, type) and issubclass(base, torch.nn.Module) and name not in ("Linear", "Embedding"):
            setattr(QuantLoaderOps, name, _dequantising(base, context))
    return QuantLoaderOps


def _dequantising(base: type, context: LoadContext) -> type:
    """``base`` that turns a packed weight into a dense one while loading."""

    class Dequantising(base):  # type: ignore[misc]
        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
            key = f"{prefix}weight"
            weight: Any = state_dict.get(key)
            names = [n for n, parameter in self._parameters.items() if parameter is not None]
            context.note(self, prefix, names, state_dict)
            self.lacking = key if weight is None and "weight" in names else None
            if is_packed(weight):
                declaration = weight._params.declaration
                wanted = tuple(self.weight.shape)
                dense = weight.dequantize()
                if dense.numel() == self.weight.numel():
                    state_dict = {**state_dict, key: dense.reshape(wanted).to(self.weight.dtype)}
                    context.dequantised[declaration.name] = (
                        f"{base.__name__} has no quantised kernel; dequantised while loading"
                    )
                    context.consumed.add(declaration.key)
                else:
                    context.mismatches[declaration.key] = (
                        f"the file holds {_dims(tuple(dense.shape))}, the model's {base.__name__} is {_dims(wanted)}"
                    )
                    return
            super()._load_from_state_dict(state_dict, prefix, *rest)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            # What a module holds without its weight is whatever was in memory.
            lacking = self.__dict__.get("lacking")
            if lacking is not None:
                raise ModelMismatch(_lacking(lacking))
            return super().forward(*args, **kwargs)

    Dequantising.__name__ = Dequantising.__qualname__ = base.__name__
    return Dequantising


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A plain tensor in the module's dtype; the memory-mapped one itself when it has it already."""
    return as_stored(tensor).to(dtype=dtype)
