"""The demo behind `python3 demo.py`: one server that switches, one plain server, one table.

`launcher` and what it imports (`install`, `processes`, `progress`, `server_log`) run on the
system's Python with nothing installed; `show` and the rest run inside the environment.
"""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on. The message says what failed and what to do."""
