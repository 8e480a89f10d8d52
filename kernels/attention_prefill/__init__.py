"""Attention that also returns its log-sum-exp, so that parts over disjoint keys can be merged.

ATTENTION takes masks and batches; ROWS is for many queries over a long stretch of keys, where a GPU's time goes; BLOCKS
and WINDOW take a whole chunk of retrieval and of streaming heads on a CPU.
"""

from kernels.attention_prefill import blocks, cpu_flash, cuda_flash, flash_attn, ref
from kernels.attention_prefill.flashinfer import FlashInfer
from kernels.attention_prefill.ref import merge_
from kernels.attention_prefill.torch_rows import TorchRows
from kernels.registry import Backend, Kernel, always

ATTENTION = Kernel(
    "attention_prefill",
    (
        Backend("cpu_flash", cpu_flash, cpu_flash.declines),
        Backend("cuda_flash", cuda_flash, cuda_flash.declines),
        Backend("reference", ref, always),
    ),
)

BLOCKS = Kernel("attention_blocks", (Backend("native", blocks, blocks.declines), Backend("merged parts", None, always)))
WINDOW = Kernel(
    "attention_chunk_window",
    (Backend("native", blocks, blocks.declines_window), Backend("masked tiles", None, always)),
)


class _Reference:
    attend = staticmethod(ref.attend_rows)


ROWS = Kernel(
    "attention_rows",
    (
        *(Backend(f"flashinfer_{x.kernel}", x, x.declines) for x in (FlashInfer("fa3"), FlashInfer("fa2"))),
        Backend("flash_attn", flash_attn, flash_attn.declines),
        *(Backend(f"torch_{x.kernel}", x, x.declines) for x in (TorchRows("cudnn"), TorchRows("flash"))),
        Backend("reference", _Reference, always),
    ),
)

__all__ = ["ATTENTION", "BLOCKS", "ROWS", "WINDOW", "merge_"]
