"""`python -m cuda_ext.distributed`: see `prediction.command` and `context_parallel.command`."""

import sys

from cuda_ext.distributed.context_parallel.command import add
from cuda_ext.distributed.prediction.command import main

if __name__ == "__main__":
    sys.exit(main(others=[add]))
