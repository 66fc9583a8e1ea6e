"""Triton kernels: twins of the functions in `blocks.py` and the fused update, one file a kernel.

Each but the transpose, which runs inside of ops, is a `torch.library` op, those of activations in
`gemm.py`. On CPU tensors it runs the plain-PyTorch definition in `blocks.py`, on CUDA tensors the
kernel: codes, scales and transposed copies are the same bits, updated main values
and moments differ by roundings. With TRITON_INTERPRET=1 set before the first import, the functions
named `launch_*` also take CPU tensors.
"""
