"""The text-to-image workflow of the demo in ComfyUI's API format, made of stock nodes and one loader."""

from __future__ import annotations

from typing import Any

from .client import Workflow

LOADER, SAMPLER, PICTURE, LATENT, REPORT = "loader", "sampler", "picture", "latent", "report"
VAE_FILE = "tiny-taesd.safetensors"
SIZE = 256  # pixels on a side
STEPS = 2


OUR_NODE = "QuantLoaderDiffusionModel"


def quant_loader(model_name: str, rules: str = "strict", execution: str = "auto") -> dict[str, Any]:
    """This pack's loader node."""
    inputs = {"model_name": model_name, "rules": rules, "execution": execution}
    return {"class_type": OUR_NODE, "inputs": inputs}


def stock_loader(model_name: str) -> dict[str, Any]:
    """ComfyUI's own loader node, for the 16-bit reference and for comparisons."""
    return {"class_type": "UNETLoader", "inputs": {"unet_name": model_name, "weight_dtype": "default"}}


def text_to_image(loader: dict[str, Any], prefix: str, seed: int = 7, steps: int = STEPS, size: int = SIZE) -> Workflow:
    """Loader, fixed conditioning, `steps` Euler steps, a PNG and the latent, both saved under `prefix`.

    With this pack's loader also its report as text.
    """
    report = {REPORT: {"class_type": "PreviewAny", "inputs": {"source": [LOADER, 1]}}}
    return {
        LOADER: loader,
        "conditioning": {"class_type": "LotusConditioning", "inputs": {}},
        "canvas": {"class_type": "EmptySD3LatentImage", "inputs": {"width": size, "height": size, "batch_size": 1}},
        SAMPLER: {
            "class_type": "KSampler",
            "inputs": {
                "model": [LOADER, 0],
                "seed": seed,
                "steps": steps,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "positive": ["conditioning", 0],
                "negative": ["conditioning", 0],
                "latent_image": ["canvas", 0],
                "denoise": 1.0,
            },
        },
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": VAE_FILE}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": [SAMPLER, 0], "vae": ["vae", 0]}},
        PICTURE: {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": prefix}},
        LATENT: {"class_type": "SaveLatent", "inputs": {"samples": [SAMPLER, 0], "filename_prefix": prefix}},
        **(report if loader["class_type"] == OUR_NODE else {}),
    }
