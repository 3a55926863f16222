"""The server's address, and what a request to it carries."""

from __future__ import annotations

import pytest

from sglang_spec_ext.ops.address import is_here, reachable, session


@pytest.mark.parametrize(
    ("url", "connected"),
    [
        ("http://0.0.0.0:30000/", "http://127.0.0.1:30000"),
        ("127.0.0.1:5", "http://127.0.0.1:5"),
        ("https://gpu.example/v1", "https://gpu.example"),
        ("http://[::]:30000", "http://[::1]:30000"),
        ("http://[::1]", "http://[::1]"),
        ("http://:30000", "http://127.0.0.1:30000"),
    ],
)
def test_addresses_that_can_be_connected_to(url: str, connected: str) -> None:
    assert reachable(url) == connected


@pytest.mark.parametrize("url", ["", "http://", "http://[::1", "http://h:99999", "ftp://h", "h:x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of a server, as http://127"):
        reachable(url)


def test_no_proxy_stands_before_this_box() -> None:
    assert not session("http://127.0.0.1:1").trust_env
    assert not session("http://[::1]:1").trust_env
    assert session("http://box:1").trust_env
    assert is_here("http://localhost:1") and not is_here("http://box:1")


def test_the_key_goes_along() -> None:
    assert session("http://box", "secret").headers["Authorization"] == "Bearer secret"
    assert "Authorization" not in session("http://box").headers
