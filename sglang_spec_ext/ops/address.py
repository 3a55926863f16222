"""Where a server is, and how to talk to it over HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

import requests

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def reachable(url: str) -> str:
    """The URL without a path, with an address that can be connected to. Raises ValueError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port_number = parts.port  # may raise, as splitting does
        fits = parts.scheme in ("http", "https") and bool(parts.hostname or port_number)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{url!r} is no address of a server, as http://127.0.0.1:30000 would be")
    host, _, port = parts.netloc.rpartition(":") if ":" in parts.netloc else (parts.netloc, "", "")
    host = _EVERYWHERE.get(host, host)
    return f"{parts.scheme}://{host}:{port}" if port else f"{parts.scheme}://{host}"


def is_here(url: str) -> bool:
    """Whether the URL names this very box."""
    return urlsplit(url).hostname in _LOOPBACK


def session(url: str, api_key: str = "") -> requests.Session:
    """For requests to the server at ``url``, with its key if it has one."""
    made = requests.Session()
    if is_here(url):
        # Clusters set http_proxy for everything; a proxy cannot reach this box's loopback.
        made.trust_env = False
    if api_key:
        made.headers["Authorization"] = f"Bearer {api_key}"
    return made
