"""A process of its own with ComfyUI's dynamic VRAM: loads a file and prints as JSON what test_dynamic_vram asks about.

    python -P dynamic_vram.py FILE EXECUTION HEADROOM_BYTES

ComfyUI switches dynamic VRAM on before PyTorch is imported, for the whole process; this does what its main.py does.
HEADROOM_BYTES is the memory of the device that stays free, which makes the rest a small one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quant_loader.demo.paths import comfyui_tree


def switch_on(headroom: int) -> bool:
    """Whether this process has dynamic VRAM now."""
    import comfy_aimdo.control

    try:
        comfy_aimdo.control.init(simple_vram_headroom=headroom)
    except TypeError:  # an older comfy-aimdo
        comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = [device.index for device in comfy.model_management.get_all_torch_devices()]
    try:
        working = comfy_aimdo.control.init_devices((index, headroom) for index in devices)
    except TypeError:
        working = comfy_aimdo.control.init_devices(iter(devices))
    if working:
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    return bool(working)


def denoise(patcher: Any) -> Any:
    """One call of a tiny Flux, as a sampler makes it."""
    import comfy.model_management
    import torch
    from quant_loader.demo import models

    generator = torch.Generator().manual_seed(5)
    shapes = ((1, models.LATENT_CHANNELS, 8, 8), (1, 77, models.CONTEXT), (1, models.VECTOR))
    x, context, vector = (torch.randn(s, generator=generator).to(patcher.load_device) for s in shapes)
    sigma = torch.full((1,), 0.6, device=patcher.load_device)
    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    with torch.no_grad():
        out = patcher.model.apply_model(x, sigma, c_crossattn=context, y=vector)
    patcher.cleanup()
    return out.cpu()


def with_lora(patcher: Any) -> Any:
    import torch
    from comfy.weight_adapter import LoRAAdapter
    from quant_loader.patching.patcher import packed_modules

    generator = torch.Generator().manual_seed(2)
    patches = {}
    for key, module in packed_modules(patcher.model).items():
        N, K = module.weight.shape
        up, down = torch.randn(N, 4, generator=generator) * 0.05, torch.randn(4, K, generator=generator) / K**0.5
        patches[key] = LoRAAdapter(set(), (up, down, 4.0, None, None, None))
    patched = patcher.clone()
    patched.add_patches(patches, 0.7)
    return patched


def facts(path: str, execution: str) -> dict[str, Any]:
    import comfy.model_management
    import torch
    from quant_loader.patching.load import load_diffusion_model

    def load() -> Any:
        return load_diffusion_model([path], "strict", execution)[0]

    patcher = load()
    size = patcher.model_size()
    found: dict[str, Any] = {
        "patcher": type(patcher).__name__,
        "size": size,
        "bytes": sum(t.nbytes for t in patcher.model.state_dict().values()),
    }
    fresh = denoise(patcher)
    found["finite"] = bool(torch.isfinite(fresh).all())
    found["again"] = torch.equal(denoise(patcher), fresh)
    patcher.partially_unload(patcher.offload_device, size // 2)
    found["after a partial unload"] = torch.equal(denoise(patcher), fresh)
    comfy.model_management.unload_all_models()
    found["loaded after unloading"] = patcher.loaded_size()
    found["after unloading all"] = torch.equal(denoise(patcher), fresh)
    found["loaded anew"] = torch.equal(denoise(load()), fresh)

    patched = with_lora(patcher)
    lora = denoise(patched)
    found["lora changes"] = not torch.equal(lora, fresh)
    static = patched.clone(disable_dynamic=True)
    found["static patcher"] = type(static).__name__
    found["lora kept by the static clone"] = torch.equal(denoise(static), lora)
    found["without the lora"] = torch.equal(denoise(patcher), fresh)
    return found


def main() -> None:
    path, execution, headroom = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, str(comfyui_tree()))
    import comfy.cli_args

    comfy.cli_args.args.cpu = headroom < 0  # for trying this script on a machine without a device
    dynamic = headroom >= 0 and switch_on(headroom)
    print(json.dumps({"dynamic": dynamic, "file": Path(path).name} | facts(path, execution)))


if __name__ == "__main__":
    main()
