"""Our kernels beside public peers, in one run on one GPU: `python -m benchmarks.peers`."""
