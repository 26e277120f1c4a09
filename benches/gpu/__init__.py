"""Kernels on a GPU: CUDA-graph replays beside PyTorch on the same machine, one module a family."""
