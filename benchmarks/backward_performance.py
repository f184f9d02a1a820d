"""Time of a forward and backward pass with all gradients (dbias included) of every implementation and peer, in one run.

The forward pass is timed too, so that the backward pass alone can be told.
"""

import sys

from runner import run_performance
from workloads import FORWARD, TRAINING

if __name__ == "__main__":
    sys.exit(run_performance(__doc__, [FORWARD, TRAINING]))
