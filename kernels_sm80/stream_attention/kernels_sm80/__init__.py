"""CUDA C++ kernels for sm_80 (A100) and, through the PTX in the library, any later GPU.

`capabilities.register` announces them to the registry, `library.LIBRARY` is the shared library.
Importing this package needs no GPU, driver or compiler.
"""
