"""A small HTTP server in the test's own process; the fixture `serve` starts and ends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, Any]]
"""Status and body of the answer to a GET; a body that is no bytes goes out as JSON."""

Serve = Callable[[Answer], str]
"""Start a server with this answer to everything; its URL."""


@contextmanager
def serving() -> Iterator[Serve]:
    started: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answer(self)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                with suppress(ConnectionError):  # who had to wait may have gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        started.append(http)
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{http.server_port}"

    yield start
    for http in started:
        http.shutdown()
        http.server_close()
