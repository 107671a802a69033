"""A proxy between a client and a store that answers wrongly on purpose.

`FaultProxy(port)` forwards to 127.0.0.1:port and is told what to do by `rule(...)` (the first that
matches, `times` times) or `chance(...)` (a share of all requests, by a fixed seed). `requests` is
the list of (method, path) that came, in order; `most` how many were in progress at once.
"""

import http.client
import random
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FaultProxy:
    def __init__(self, port, serial=False, mend=None):
        self.port_behind = port
        self.mend = mend or (lambda body: body)  # what a store misreads, made plain
        self.requests = []
        self.faults = 0
        self.now, self.most = 0, 0  # requests in progress, and the most there were
        self._rules, self._chances = [], []
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self.one_by_one = threading.Lock() if serial else None  # for a store that cannot do more
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def rule(self, action, method=".*", path=".*", times=1):
        """action: (status, 503) | (delay, 2.0) | (reset,) | (cut, 10): bytes of the body."""
        self._rules.append([re.compile(method), re.compile(path), action, times])

    def chance(self, share, *actions):
        """Each request fails by one of the actions with this probability."""
        self._chances.append((share, actions))

    def clear(self):
        self._rules, self._chances, self.requests, self.faults = [], [], [], 0
        self.most = 0

    def choose(self, method, path):
        with self._lock:
            self.requests.append((method, path))
            for rule in self._rules:
                if rule[3] > 0 and rule[0].fullmatch(method) and rule[1].search(path):
                    rule[3] -= 1
                    self.faults += 1
                    return rule[2]
            for share, actions in self._chances:
                if self._random.random() < share:
                    self.faults += 1
                    return self._random.choice(actions)
        return (None,)

    def count(self, change):
        with self._lock:
            self.now += change
            self.most = max(self.most, self.now)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner = None

    def log_message(self, *_):
        return

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _serve(self):
        try:
            self._serve_one()
        except ConnectionError:  # the client hung up, as a killed one does
            self.close_connection = True

    def _serve_one(self):
        if "100-continue" in self.headers.get("Expect", ""):
            self.send_response_only(100)
            self.end_headers()
        body = self._body()
        self.owner.count(1)
        try:
            self._serve_body(body)
        finally:
            self.owner.count(-1)

    def _serve_body(self, body):
        kind, *rest = self.owner.choose(self.command, self.path)
        if kind == "delay":
            time.sleep(rest[0])
        if kind == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            return self.connection.close()
        if kind == "status":
            return self._answer(rest[0], [], b"refused on purpose")
        if self.owner.one_by_one:
            with self.owner.one_by_one:
                status, headers, answer = self._forward(body)
        else:
            status, headers, answer = self._forward(body)
        self._answer(status, headers, answer, cut=rest[0] if kind == "cut" else None)

    def _forward(self, body):
        behind = http.client.HTTPConnection("127.0.0.1", self.owner.port_behind, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        body = self.owner.mend(body)
        if "Content-Length" in headers:
            headers["Content-Length"] = str(len(body))
        behind.request(self.command, self.path, body, headers)
        response = behind.getresponse()
        answer = response.read()
        behind.close()
        return response.status, response.getheaders(), answer

    def _answer(self, status, headers, answer, cut=None):
        self.send_response_only(status)
        length = str(len(answer))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in (*_HOP, "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer if cut is None else answer[:cut])
        if cut is not None and len(answer) > cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve


_HOP = ("transfer-encoding", "connection", "keep-alive", "expect")
