"""Octavo's application."""

import os

# Threads wait for each other at the end of every kernel. OpenMP has them look 300,000 times before they sleep: some
# milliseconds, in which the one they wait for gets no core where another program runs too, and the engine takes
# several times its share of time. This is read when torch is loaded, so it stands in front of every import of it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
