"""The demo and the harness that the end-to-end tests share: tiny models, a real ComfyUI server, workflows.

Not part of the installed distribution; reachable as `quant_loader.demo` because the pack is installed editable.
"""
