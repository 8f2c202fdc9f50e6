"""Report + state dict -> a ComfyUI model whose linears run our kernels. The only room that knows ComfyUI internals.

Only `host` is imported with the pack, which then looks whether this ComfyUI has what the rest builds on.
"""
