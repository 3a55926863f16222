#!/usr/bin/env python3
"""The demo: a tiny model on CPU that speculates while few requests run. See `--help`."""

import sys

# Before any import of ours: an older Python must see this line, not a SyntaxError.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"demo.py needs Python 3.10 or newer, this is {sys.version.split()[0]}")

from testbed.demo.launcher import main

if __name__ == "__main__":
    sys.exit(main())
