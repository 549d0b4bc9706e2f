"""`python -m kilburn`: the same as `kilburn`."""

from __future__ import annotations

import sys

from kilburn.cli import main

if __name__ == "__main__":
    sys.exit(main())
