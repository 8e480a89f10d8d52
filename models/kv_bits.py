"""The limits of a 4-bit cache's budget that is shared among the heads, whatever the model.

In bits of an element of the history, mean over the retrieval heads, scales included.
"""

LEAST = 4
MOST = 8.5  # 8 and the scales of heads of size 64; of larger ones they are less, which the model tells
