"""Servers on this machine that data come from: one of objects as S3 has them, and a web server that fails as networks do."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def object_server():
    """Serve S3; yield the environment in which programs find it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    finally:
        server.stop()


class Web:
    """A web server of files that are given as bytes.

    Attributes:
        files: by name. A name that is missing is answered with 404.
        status: what all requests are answered with; 0 for as they should be.
        cut_every: every so many requests for bytes, the connection is cut in the middle.
        wait_s: before each answer.
        tags: the header that tells versions of a file apart.
        has_ranges: whether parts of a file can be asked for.
        asked: the names and ranges of all requests.
    """

    def __init__(self, files):
        self.files, self.status, self.cut_every, self.wait_s, self.asked = dict(files), 0, 0, 0.0, []
        self.versions, self.tags, self.has_ranges = dict.fromkeys(files, 0), "ETag", True
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer(False)

            def do_GET(self):
                self.answer(True)

            def answer(self, with_body):
                time.sleep(web.wait_s)
                name = self.path.lstrip("/").partition("?")[0]
                data, asked = web.files.get(name), re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                asked = asked if web.has_ranges else None
                status = web.status or (404 if data is None else 206 if asked else 200)
                data = b"" if status >= 400 else data
                start, stop = 0, len(data)
                if asked and status == 206:
                    start, stop = int(asked[1]), min(len(data), int(asked[2] or len(data) - 1) + 1)
                web.asked.append((name, start, stop, with_body))
                self.send_response(status)
                self.send_header(web.tags, f'"{web.versions.get(name)}"')
                if asked and status == 206:
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
                self.send_header("Content-Length", str(stop - start))
                self.end_headers()
                if with_body:
                    bodies = sum(body for *_, body in web.asked)
                    if web.cut_every and bodies % web.cut_every == 0:
                        self.wfile.write(data[start : (start + stop) // 2])
                        self.close_connection = True
                        self.connection.close()
                    else:
                        self.wfile.write(data[start:stop])

            def log_message(self, *said):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def change(self, name, data):
        self.files[name], self.versions[name] = data, self.versions[name] + 1

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()
