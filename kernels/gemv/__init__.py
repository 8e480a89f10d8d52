"""One row times a weight matrix, with everything behind the product in the same pass."""

from kernels.gemv import cuda, ref
from kernels.registry import Backend, Kernel, always

GEMV = Kernel("gemv", (Backend("cuda", cuda, cuda.declines), Backend("as many rows", ref, always)))
