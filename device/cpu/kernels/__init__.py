"""The kernels of the CPU tier: Numba functions over addresses. Importing a module of it imports Numba."""

from ..tier import configure

configure()  # Numba asks for the processor once, when it meets the first function
