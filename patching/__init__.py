"""Report + state dict -> a ComfyUI model whose linears run our kernels. The only room that knows ComfyUI internals.

Nothing here is imported before a node needs it, so that the pack imports on any machine.
"""
