"""A real HTTP server on localhost for the download tests.

It serves bytes by path, honours Range, and can break off, refuse robots, dawdle or lie.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client may hang up at any time


class Server:
    """Files by path, and what to do wrong when they are asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.break_off: dict[str, list[int]] = {}  # path -> bytes to send before hanging up
        self.status: dict[str, int] = {}  # path -> error to answer
        self.delay: dict[str, float] = {}  # path -> seconds before the answer
        self.length: dict[str, int] = {}  # path -> Content-Length to claim
        self.etags: dict[str, str] = {}  # path -> ETag to send
        self.endless: set[str] = set()  # paths whose answer has no length and no end
        self.sent = 0  # bytes of endless answers
        self.browsers_only = False
        self.ignore_range = False
        self.requests: list[tuple[str, str]] = []  # (path, Range header)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                owner.answer(self)

        self.http = _Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range") or ""
        self.requests.append((handler.path, asked))
        time.sleep(self.delay.get(handler.path, 0.0))
        robot = "Mozilla" not in (handler.headers.get("User-Agent") or "")
        body = self.files.get(handler.path)
        status = self.status.get(handler.path, 404 if body is None else 200)
        if self.browsers_only and robot:
            status = 403
        if status >= 400 or body is None:
            handler.send_response(status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if handler.path in self.endless:
            self._answer_without_end(handler, body)
            return
        start = 0
        if asked and not self.ignore_range:
            start = int(asked[len("bytes=") : -1])
            if start >= len(body):
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(body)}")
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            handler.send_response(200)
        if handler.path in self.etags:
            handler.send_header("ETag", self.etags[handler.path])
        handler.send_header("Content-Length", str(self.length.get(handler.path, len(body) - start)))
        handler.end_headers()
        left = self.break_off.get(handler.path) or []
        stop = start + left.pop(0) if left else len(body)
        handler.wfile.write(body[start:stop])
        if stop < len(body):
            handler.wfile.flush()
            handler.connection.close()
            handler.close_connection = True

    def _answer_without_end(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for _ in range(1000):  # 700 MB of the tests' file: enough to tell
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            self.sent += len(body)


def make_tgz(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    """A tar of these members, in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_zip(members: dict[str, bytes]) -> bytes:
    """A zip of these members; names are written as given, `..` included."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in members.items():
            bundle.writestr(name, data)
    return buffer.getvalue()


def write_checksums(path: Path, files: dict[str, bytes]) -> Path:
    """A --checksums file as sha256sum writes it."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
    path.write_text("".join(lines))
    return path


def messages(stderr: str) -> list[str]:
    """The lines of stderr without progress bars."""
    return [line for line in stderr.splitlines() if line.strip() and "%|" not in line]


def tree(folder: Path) -> list[str]:
    """All files below a folder, hidden ones too; empty if it does not exist."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
