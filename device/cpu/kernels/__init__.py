"""The kernels of the CPU tier: Numba functions over addresses. Importing a module of it imports Numba."""
