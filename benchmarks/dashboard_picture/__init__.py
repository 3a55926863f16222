"""A picture of what the panels of a Grafana dashboard show, from the answers of a Prometheus.

`dashboard` reads and checks the JSON, `variables` and `queries` ask `prometheus` what it asks for,
`page` draws that: each of its `panels` in a `frame`, with the colours of `looks`.
"""

from __future__ import annotations


class PictureError(ValueError):
    """There is no picture; the message says of what file, panel or server, and why."""
