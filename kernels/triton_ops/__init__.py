"""One file per Triton kernel: kernel, host function, formula."""
