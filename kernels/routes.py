"""How a format says what can run it: a table of routes, each with the question whether it fits a layer on a device.

A route's ``fits`` answers None (it does) or the reason it does not, in words for the person who reads the plan. Order
in a format's table is preference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .facts import DeviceFacts, Version
from .spec import Spec
from .triton_ops import MIN_TRITON, int8_matmul_supported

Backend = Literal["kitchen", "triton", "torch"]
Execution = Literal["native", "int8", "exact"]
Fits = Callable[[Spec, DeviceFacts], str | None]
Slow = Callable[[DeviceFacts], bool]


def _always(_spec: Spec, _facts: DeviceFacts) -> str | None:
    return None


def never_slow(_facts: DeviceFacts) -> bool:
    """A route that is at least as fast as a 16-bit linear wherever it fits."""
    return False


def always_slow(_facts: DeviceFacts) -> bool:
    """A route that stands in for hardware the device does not have."""
    return True


@dataclass(frozen=True)
class Route:
    """One way to run a format's linear.

    ``execution`` and ``backend`` name the body in the format's operator; ``operator`` is what a report calls it;
    ``why`` completes "it is used because ..."; ``slow`` says whether it is clearly behind a 16-bit linear on a device
    it fits.
    """

    execution: Execution
    backend: Backend
    operator: str
    why: str
    fits: Fits = _always
    slow: Slow = never_slow
    stands_in: bool = False


def all_of(*questions: Fits) -> Fits:
    """Fits where all of them do; the first reason otherwise."""

    def fits(spec: Spec, facts: DeviceFacts) -> str | None:
        return next((reason for question in questions if (reason := question(spec, facts)) is not None), None)

    return fits


def _text(version: Version | None) -> str:
    return ".".join(map(str, version[:2])) if version else "none"


def kitchen(*operators: str) -> Fits:
    """comfy-kitchen has real kernels for all of ``operators`` on this device."""

    def fits(_spec: Spec, facts: DeviceFacts) -> str | None:
        if facts.maker not in ("nvidia", "amd"):
            return "comfy-kitchen has kernels for NVIDIA and AMD graphics cards only."
        if facts.kitchen is None:
            return "comfy-kitchen is not installed."
        backend = "hip" if facts.maker == "amd" else "cuda"
        if backend not in facts.kitchen_backends:
            if facts.maker == "nvidia" and facts.torch_cuda is not None and facts.torch_cuda < (13,):
                return f"PyTorch is built for CUDA {_text(facts.torch_cuda)}; comfy-kitchen's kernels need 13.0."
            if facts.maker == "amd" and not facts.amd_matrix_units:
                return f"comfy-kitchen has no matrix kernels for {facts.arch}: this card has no matrix units."
            detail = f" ({facts.kitchen_problem})" if facts.kitchen_problem else ""
            return f"comfy-kitchen's {backend} kernels are not loaded or switched off{detail}."
        missing = [name for name in operators if f"{backend}.{name}" not in facts.kitchen_operators]
        if missing:
            return f"comfy-kitchen {facts.kitchen} has no {backend} kernel for {missing[0]}."
        return None

    return fits


def nvidia(minimum: tuple[int, int], what: str) -> Fits:
    """An NVIDIA card of at least this compute capability."""

    def fits(_spec: Spec, facts: DeviceFacts) -> str | None:
        if facts.maker != "nvidia":
            return f"{what} needs an NVIDIA card."
        if facts.sm < minimum:
            return f"{what} needs compute capability {_text(minimum)}; this card has {_text(facts.sm)}."
        return None

    return fits


def own_triton(_spec: Spec, facts: DeviceFacts) -> str | None:
    """Our element-wise Triton kernels can run."""
    if facts.own_kernels == "off":
        return "this pack's own kernels are switched off (QUANT_LOADER_KERNELS=0)."
    if facts.maker not in ("nvidia", "amd"):
        return "this pack's own kernels are for NVIDIA and AMD graphics cards."
    if facts.triton is None:
        return "Triton is not installed."
    if facts.triton < MIN_TRITON:
        return f"Triton {_text(facts.triton)} is too old; {_text(MIN_TRITON)} is needed."
    return None


def triton_matmul(_spec: Spec, facts: DeviceFacts) -> str | None:
    """Our Triton INT8 product can run: a tensor core that Triton reaches."""
    reason = own_triton(_spec, facts)
    if reason is not None:
        return reason
    arch = facts.arch if facts.maker == "amd" else f"sm_{facts.sm[0]}{facts.sm[1]}"
    if arch is not None and int8_matmul_supported(arch):
        return None
    if facts.maker == "amd":
        return f"{facts.arch} has no int8 matrix unit."
    return f"Triton reaches no tensor cores on this card (compute capability {_text(facts.sm)}; 8.0 is needed)."


def torch_int8_units(_spec: Spec, facts: DeviceFacts) -> str | None:
    """``torch._int_mm`` runs on int8 units of this device, exactly."""
    if facts.maker == "cpu":
        return None if facts.vnni else "this CPU has no exact int8 instructions (VNNI)."
    if facts.maker == "nvidia":
        return None if facts.sm >= (6, 1) else "this card has no int8 units."
    if facts.maker == "amd":
        return "PyTorch has no dependable int8 product for AMD cards."
    return "PyTorch has no int8 product for this device."


def torch_int8_slow(facts: DeviceFacts) -> bool:
    """Where PyTorch's unfused int8 path falls behind a 16-bit linear: data-center cards, whose int8 is only twice as
    fast as bf16, and every device without int8 units but the CPU (there the codes are multiplied as float32, at the
    speed of any linear)."""
    if facts.maker == "nvidia":
        return facts.sm < (6, 1) or facts.sm == (8, 0) or facts.sm[0] in (9, 10)
    return facts.maker != "cpu"


def inputs_divisible(by: int, what: str) -> Fits:
    """K is a multiple of ``by``."""

    def fits(spec: Spec, _facts: DeviceFacts) -> str | None:
        K = spec.shape[1]
        return (
            None if K % by == 0 else f"{what} needs the number of inputs to be a multiple of {by}; this layer has {K}."
        )

    return fits


def outputs_divisible(by: int, what: str) -> Fits:
    """N is a multiple of ``by``."""

    def fits(spec: Spec, _facts: DeviceFacts) -> str | None:
        N = spec.shape[0]
        return (
            None if N % by == 0 else f"{what} needs the number of outputs to be a multiple of {by}; this layer has {N}."
        )

    return fits


def block_scaled_mm(_spec: Spec, facts: DeviceFacts) -> str | None:
    """torch's block-scaled ``scaled_mm``."""
    if facts.torch < (2, 10):
        return f"PyTorch {'.'.join(map(str, facts.torch))} has no block-scaled product; 2.10 is needed."
    return None


def rotatable(spec: Spec, _facts: DeviceFacts) -> str | None:
    """The weight can be carried over to INT8 rows with ConvRot."""
    K = spec.shape[1]
    return None if K % 16 == 0 else f"carrying a weight over to INT8 needs a multiple of 16 inputs; this layer has {K}."


def preferred(routes: tuple[Route, ...], facts: DeviceFacts) -> tuple[Route, ...]:
    """The table's order, or our own kernels first where the user asked for that."""
    if facts.own_kernels != "first":
        return routes
    return tuple(sorted(routes, key=lambda route: route.backend != "triton"))


def carried_routes(why: str, *routes: Route) -> tuple[Route, ...]:
    """INT8 routes as the ``int8`` execution of a format whose weight is carried over to INT8 rows; ``why`` comes before
    theirs.
    """
    return tuple(
        replace(route, execution="int8", fits=all_of(rotatable, route.fits), why=f"{why} {route.why}")
        for route in routes
    )
