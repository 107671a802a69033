"""A folder as an S3 bucket on loopback, read only, where every request takes a while.

    python benchmarks/slow_store.py FOLDER PORT MILLISECONDS

Just enough of the protocol for s3fs to read: HEAD and GET with ranges, and listings that are empty.
It does not limit how many requests run at once, as the real services do not.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

EMPTY = b'<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>'


async def answer(folder: Path, method: str, target: str, headers: dict[str, str]) -> bytes:
    url = urlsplit(target)
    path = folder / unquote(url.path).lstrip("/").partition("/")[2]
    if "list-type" in url.query:
        return _response("200 OK", EMPTY)
    if not path.is_file():
        return _response("404 Not Found", b"")
    size, start, status = path.stat().st_size, 0, "200 OK"
    end = size
    if wanted := headers.get("range"):
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end, status = int(first), int(last) + 1 if last else size, "206 Partial Content"
    if method == "HEAD":
        return _response(status, b"", end - start)
    with open(path, "rb") as file:
        file.seek(start)
        body = file.read(end - start)
    return _response(status, body, more=f"Content-Range: bytes {start}-{end - 1}/{size}\r\n")


def _response(status: str, body: bytes, size: int | None = None, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if size is None else size}\r\n"
    head += 'ETag: "1"\r\nLast-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n' + more + "\r\n"
    return head.encode() + body


async def serve(folder: Path, port: int, seconds: float) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, target, _ = line.decode().split(" ", 2)
                headers = {}
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                await asyncio.sleep(seconds)
                writer.write(await answer(folder, method, target, headers))
                await writer.drain()
        except ConnectionError:  # the client is done
            return
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port, backlog=512)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000))
