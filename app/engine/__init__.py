"""The engine: a model, its KV cache on one device, and the loop that reads and answers."""

import os
import sys

if sys.platform == "linux":
    # Read by torch before its first allocation. Blocks that the allocator keeps for later grow where they lie: without
    # it, a context that fills an 80 GB card leaves pieces unused that its last chunk needs.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
