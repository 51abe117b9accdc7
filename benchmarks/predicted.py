"""`python -m benchmarks.predicted`: benchmarks/model/predicted.py under a short name."""

import sys

from benchmarks.model.predicted import main

if __name__ == "__main__":
    sys.exit(main())
