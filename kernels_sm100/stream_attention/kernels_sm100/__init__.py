"""CUDA C++ kernels for sm_100a (B200, GB200).

`capabilities.register` announces them to the registry, `library.LIBRARY` is the shared library.
Importing this package needs no GPU, driver or compiler.
"""
