"""A server that speaks OpenAI's API as far as it gets: it breaks off, refuses, and is whole again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECES = ("The first words", " and more")


class Broken(ThreadingHTTPServer):
    """`how`: "dies" drops the connection within an answer, "ends" closes it in good order before the answer's end,
    "refuses" wants another key, "fails" answers 500, "whole" is as it should be."""

    daemon_threads = True
    how = "whole"


class _Handler(BaseHTTPRequestHandler):
    server: Broken
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.how == "refuses":
            return self._json(401, {"error": {"message": "no", "type": "x", "param": None, "code": None}})
        if self.server.how == "fails":
            return self._json(500, {"error": {"message": "out of memory", "type": "x", "param": None, "code": None}})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        if self.server.how == "dies":
            self.send_header("content-length", "1000000")  # which never come
        self.end_headers()
        self.close_connection = True
        for text in PIECES:
            self._event({"content": text}, None)
        if self.server.how == "whole":
            self._event({}, "stop")
            self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, delta: dict[str, str], reason: str | None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def broken_server() -> Iterator[tuple[str, Broken]]:
    """Serves it; gives the address of its API."""
    server = Broken(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", server
    finally:
        server.shutdown()
        server.server_close()
