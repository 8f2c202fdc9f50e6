"""Report + state dict -> a ComfyUI model whose linears run our kernels. The only room that knows ComfyUI internals."""
