"""CUDA C++ kernels for sm_90a (H100, H200).

`capabilities.register` announces them to the registry, `library.LIBRARY` is the shared library.
Importing this package needs no GPU, driver or compiler.
"""
