"""Compiled kernels. Argument checks and loops without the GIL; imports nothing of the package."""
