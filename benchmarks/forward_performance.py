"""Time of the forward pass of every implementation and peer, in one run."""

import sys

from runner import run_performance
from workloads import FORWARD

if __name__ == "__main__":
    sys.exit(run_performance(__doc__, [FORWARD]))
