"""Triton kernels. Importing a module here needs triton; nothing is compiled before the first launch."""
