"""`python -m cuda_ext.distributed`: see `cuda_ext.distributed.prediction.command`."""

import sys

from cuda_ext.distributed.prediction.command import main

if __name__ == "__main__":
    sys.exit(main())
