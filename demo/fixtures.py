"""The files of the demo and of the end-to-end tests: every format, some broken ones, and what to expect of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import models, quantize
from .workflows import VAE_FILE

REFERENCE = "tiny-flux-bf16.safetensors"
BROKEN_LAYERS = ("double_blocks.0.img_attn.proj", "double_blocks.0.img_mlp.0", "single_blocks.0.linear1")


@dataclass(frozen=True)
class Expectation:
    """The relative L2 difference to the 16-bit latent after two steps: `measured` here, `most` is the bound.

    A value under a third of `measured` is as suspicious as one over `most`: it would mean that the layers ran
    unquantised, or that another file was loaded.
    """

    format: str
    measured: float
    most: float

    @property
    def least(self) -> float:
        return self.measured / 3.0


EXPECTATIONS: dict[str, Expectation] = {
    "int8_scalar": Expectation("int8_tensorwise", 0.0043, 0.01),
    "int8_row": Expectation("int8_tensorwise", 0.0035, 0.01),
    "int8_convrot": Expectation("int8_tensorwise", 0.0031, 0.01),
    "fp8": Expectation("float8_e4m3fn", 0.0080, 0.02),
    "mxfp8": Expectation("mxfp8", 0.0085, 0.02),
    "nvfp4": Expectation("nvfp4", 0.031, 0.06),
    "convrot_w4a4": Expectation("convrot_w4a4", 0.043, 0.10),
}


def file_name(quantizer: str) -> str:
    return f"tiny-flux-{quantizer}.safetensors"


def write_reference(diffusion_models: Path, vae: Path) -> quantize.Tensors:
    """Writes the 16-bit model and the autoencoder; returns the model's tensors."""
    tensors = models.flux_state_dict()
    quantize.save(diffusion_models / REFERENCE, tensors)
    models.write_taesd(vae / VAE_FILE)
    return tensors


def write_quantized(diffusion_models: Path, tensors: quantize.Tensors, quantizer: str) -> Path:
    """Writes the model quantised by one of `quantize.QUANTIZERS`."""
    return quantize.save(diffusion_models / file_name(quantizer), *quantize.quantize(tensors, quantizer))


def zeroed_markers(tensors: quantize.Tensors) -> quantize.Tensors:
    """FP8 with the markers of three layers overwritten by zeros."""
    return quantize.zero_markers(quantize.quantize(tensors, "fp8")[0], BROKEN_LAYERS)


def half_precision_scale(tensors: quantize.Tensors) -> quantize.Tensors:
    """INT8 with the scale of one layer in float16 instead of float32."""
    return quantize.half_scale(quantize.quantize(tensors, "int8_row")[0], BROKEN_LAYERS[0])


def column_scale(tensors: quantize.Tensors) -> quantize.Tensors:
    """W4A4 with the scale of one layer shaped [N, 1] instead of [N]."""
    return quantize.column_scale(quantize.quantize(tensors, "convrot_w4a4")[0], BROKEN_LAYERS[0])


BROKEN = {
    "broken-zeroed-markers.safetensors": zeroed_markers,
    "broken-half-scale.safetensors": half_precision_scale,
    "broken-column-scale.safetensors": column_scale,
}


def write_broken(diffusion_models: Path, tensors: quantize.Tensors, name: str) -> Path:
    """Writes one of `BROKEN`."""
    return quantize.save(diffusion_models / name, BROKEN[name](tensors))
