"""The HTTP interface of a store's folder: checks requests and carries them out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from skyward.errors import ModelNotFoundError, SerializationError, SkywardError, StoreDamagedError
from skyward.objects import memory
from skyward.store import values
from skyward.store.catalog import Catalog, manifest_url
from skyward.store.local import LocalFiles
from skyward.store.manifest import (
    DTYPES,
    HEADER_LIMIT,
    ITEM_SIZES,
    Manifest,
    View,
    head,
    object_path,
)
from skyward.store.places import MARK, PROTOCOL, TOKEN, is_loopback
from skyward.store.values import Span, tensor_at

STALLED_SECONDS = 60.0
"""An upload fails after this long without data."""
BATCH = 4 << 20
"""How many bytes of an upload are collected in memory before they are written."""
_LONGEST = 1000

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_FOLDER = re.compile(rf"(models|objects|saves|tmp)(/{_SEGMENT})*")
_FILE = re.compile(rf"(models|objects|saves|tmp)(/{_SEGMENT})+")
_DOWNLOAD = re.compile(rf"download/({_SEGMENT}(?:/{_SEGMENT})*)\.safetensors")

_log = logging.getLogger("skyward.store")
_Made = TypeVar("_Made")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Interface:
    """Answers requests for one folder."""

    def __init__(
        self, root: Path, *, token: str | None, read_only: bool, durable: bool, private: bool
    ) -> None:
        self._root = root.resolve()
        self._files = LocalFiles(self._root, durable=durable)
        self._token = token
        self._read_only = read_only
        self._private = private
        """Whether only users of this machine can reach the server."""

    def application(self) -> web.Application:
        """An application of aiohttp that answers every path."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_put("/{path:.*}", self._put)
        app.router.add_delete("/{path:.*}", self._delete)
        app.on_response_prepare.append(_mark)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if self._token is not None:
            self._check_token(request.headers.get("Authorization", ""))
        elif self._private:
            self._check_host(request.headers.get("Host", ""))
        if self._read_only and request.method not in ("GET", "HEAD"):
            raise web.HTTPForbidden(text="this store is served read-only\n")
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except ModelNotFoundError as problem:
            raise web.HTTPNotFound(text=f"{self._message(problem)}\n") from None
        except SerializationError as problem:
            raise web.HTTPUnprocessableEntity(text=f"{self._message(problem)}\n") from None
        except SkywardError as problem:
            _log.error("%s %s: %s", request.method, request.path, problem)
            raise web.HTTPInternalServerError(text=f"{self._message(problem)}\n") from None
        except OSError as problem:
            raise _failure(problem) from None
        except web.HTTPException:
            raise
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            raise web.HTTPInternalServerError(text="the server failed; see its log\n") from None

    def _check_token(self, given: str) -> None:
        wanted = f"Bearer {self._token}".encode()
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), wanted):
            raise web.HTTPUnauthorized(
                text=f"this store wants a token; send it as `Authorization: Bearer ${TOKEN}`\n",
                headers={"WWW-Authenticate": 'Bearer realm="skyward"'},
            )

    def _check_host(self, given: str) -> None:
        """Refuse requests from a website whose domain name points to this machine."""
        host = given.rpartition(":")[0] if re.search(r":\d+$", given) else given
        if not is_loopback(host.strip("[]")):
            raise web.HTTPMisdirectedRequest(
                text="without a token this store answers to localhost only\n"
            )

    def _message(self, problem: Exception) -> str:
        """The error's message without paths of the server's disk."""
        return str(problem).replace(f"{self._root}/", "").replace(str(self._root), "the store")

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = _path(request)
        if path == "":
            return await self._index(request)
        if match := _DOWNLOAD.fullmatch(path):
            return await self._download(request, match[1])
        if path.startswith("download/"):
            raise web.HTTPBadRequest(
                text="not a download: ask for /download/<name>.safetensors, "
                "with ?version=N for an older one\n"
            )
        if path.endswith("/"):
            return await self._list(path.removesuffix("/"))
        place = await _in_thread(self._file, path)
        kind = "application/json" if path.endswith(".json") else "application/octet-stream"
        return web.FileResponse(place, headers={"Content-Type": kind})

    async def _list(self, folder: str) -> web.Response:
        def found() -> bytes:
            self._inside(folder, _FOLDER)
            now = time.time()
            files = [each for each in self._files.list(folder) if _FILE.fullmatch(each.path)]
            return msgspec.json.encode({"now": now, "files": files})

        return web.Response(body=await _in_thread(found), content_type="application/json")

    async def _put(self, request: web.Request) -> web.Response:
        path = _path(request)
        await _in_thread(self._inside, path)
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired(text="an upload needs a Content-Length\n")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise web.HTTPUnsupportedMediaType(text="an upload must not be encoded\n")
        condition = request.headers.get("If-None-Match")
        if condition not in (None, "*"):
            raise web.HTTPBadRequest(text="If-None-Match takes * here\n")
        opened = contextlib.ExitStack()
        try:
            await _in_thread(self._check_room, size)
            # The stack closes the file even if the request is cancelled while the file is opened.
            temporary, handle = await _in_thread(opened.enter_context, self._files.temporary())
            await self._receive(request, handle, size)
            name = self._files.rename if condition is None else self._files.link
            if await _in_thread(name, handle, temporary, path) is False:
                raise web.HTTPPreconditionFailed(text="the file exists already\n")
        finally:
            await _in_thread(opened.close)
        return web.Response(status=201)

    async def _receive(self, request: web.Request, handle: int, size: int) -> None:
        received, held = 0, 0
        batch: list[bytes] = []
        while True:
            try:
                async with asyncio.timeout(STALLED_SECONDS):
                    data = await request.content.readany()
            except TimeoutError:
                raise web.HTTPRequestTimeout(text="the upload stalled\n") from None
            batch.append(data)
            held += len(data)
            received += len(data)
            if held >= BATCH or not data:
                await _in_thread(_write_all, handle, received - held, batch)
                batch, held = [], 0
            if not data:
                break
        if received != size:
            raise web.HTTPBadRequest(text=f"{received} bytes came, not the {size} promised\n")

    async def _delete(self, request: web.Request) -> web.Response:
        place = await _in_thread(self._inside, _path(request))
        await _in_thread(place.unlink)
        return web.Response(status=204)

    async def _index(self, request: web.Request) -> web.Response:
        numbers = await _in_thread(Catalog(self._files).numbers)
        origin = f"{request.scheme}://{request.host}"
        models = [
            {"name": name, "versions": versions, "url": f"{origin}/download/{name}.safetensors"}
            for name, versions in numbers.items()
        ]
        if "application/json" in request.headers.get("Accept", ""):
            body = msgspec.json.encode({"models": models})
            return web.Response(body=body, content_type="application/json")
        header = "" if self._token is None else f'-H "Authorization: Bearer ${TOKEN}" '
        lines = [f"A Skyward model store with {len(models)} models.\n"]
        for model in models:
            lines.append(f"{model['name']}, newest version {numbers[str(model['name'])][-1]}:")
            lines.append(f"    curl {header}-fO {model['url']}")
        return web.Response(text="\n".join(lines) + "\n")

    async def _download(self, request: web.Request, name: str) -> web.StreamResponse:
        asked = request.query.get("version")
        if asked is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", asked):
            raise web.HTTPBadRequest(text="version is a number, such as ?version=3\n")

        def prepared() -> tuple[Download, int]:
            catalog = Catalog(self._files)
            version = catalog.resolve(name, None if asked is None else int(asked))
            return Download(self._files, catalog.read(name, version)), version

        download, version = await _in_thread(prepared)
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        response.headers["Accept-Ranges"] = "bytes"
        # A name and a version number mean the same bytes for ever.
        response.etag = f"{name}-{version}"
        start, stop = 0, download.size
        if "Range" in request.headers and request.headers.get("If-Range", "").strip('"') in (
            "",
            f"{name}-{version}",
        ):
            start, stop = _asked_range(request, download.size)
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{download.size}"
        response.content_length = stop - start
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        parts = download.parts(start, stop)
        try:
            while (part := await _in_thread(next, parts, None)) is not None:
                await response.write(part)
        except (SkywardError, FileNotFoundError) as problem:
            # The head is sent: a cut connection tells the client that the file is incomplete.
            _log.error("%s: connection cut: %s", request.path, problem)
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        return response

    def _inside(self, path: str, allowed: re.Pattern[str] = _FILE) -> Path:
        """The file at a path of the store; refuses a link that leads out of the folder."""
        if not allowed.fullmatch(path) or len(path) > _LONGEST:
            raise _invalid_path()
        place = self._root / path
        if not place.resolve().is_relative_to(self._root):
            raise web.HTTPForbidden(text="the path leads out of the store\n")
        return place

    def _file(self, path: str) -> Path:
        place = self._inside(path)
        if place.is_dir():
            raise web.HTTPNotFound(text="the path is a folder; add a '/' to list it\n")
        if not place.is_file():
            raise web.HTTPNotFound(text="there is no such file\n")
        return place

    def _check_room(self, size: int) -> None:
        room = os.statvfs(self._root)
        if size > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def _mark(request: web.Request, response: web.StreamResponse) -> None:
    """Add the header that marks the answer as a model server's."""
    response.headers["X-Content-Type-Options"] = "nosniff"
    # The last header: a client that has read it has read all the others.
    response.headers[MARK] = PROTOCOL


async def _in_thread(action: Callable[..., _Made], *args: Any) -> _Made:
    """Run a blocking action in a thread; a cancellation waits until the thread is done."""
    running = asyncio.get_running_loop().run_in_executor(None, action, *args)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _path(request: web.Request) -> str:
    """The path as the client sent it, not decoded: no name in a store needs encoding."""
    return request.raw_path.partition("?")[0].removeprefix("/")


def _asked_range(request: web.Request, size: int) -> tuple[int, int]:
    try:
        start, stop, _ = request.http_range.indices(size)
    except ValueError:
        start = stop = size
    if start >= stop:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def _invalid_path() -> web.HTTPException:
    return web.HTTPBadRequest(
        text="not a path of a store: files are below models/, objects/, saves/ and tmp/, "
        "named in letters, digits, '.', '_' and '-'; a listing ends in '/'\n"
    )


def _failure(problem: OSError) -> web.HTTPException:
    reason = f"{problem.strerror or problem}\n"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return web.HTTPInsufficientStorage(text=reason)
    if isinstance(problem, FileNotFoundError):
        return web.HTTPNotFound(text="there is no such file\n")
    if isinstance(problem, IsADirectoryError | NotADirectoryError | FileExistsError):
        return web.HTTPConflict(text=reason)
    if problem.errno == errno.ENAMETOOLONG:
        return web.HTTPBadRequest(text=reason)
    _log.error("the disk: %s", problem)
    return web.HTTPInternalServerError(text=reason)


def _write_all(handle: int, at: int, batch: list[bytes]) -> None:
    for data in batch:
        memory.write_all(handle, at, memoryview(data))
        at += len(data)


# A version as one ordinary safetensors file, put together from its objects while it is sent.

BLOCK = 1 << 20
"""How many bytes are sent at a time."""
_GATHER = 16 << 20
"""A tensor with gaps is packed in blocks of about this size, but at least one row at a time."""
_ROW = 1 << 30
"""The longest row of a tensor with gaps that can be downloaded."""
_ADVICE = "load it with sky.ModelStore(...).load_model instead"


class Download:
    """The file's head, its length, and its bytes in order.

    Every tensor is contiguous and named by its path in the saved value; a tied tensor appears once
    for each name, since safetensors has neither strides nor ties. Plain values are left out.
    """

    def __init__(self, files: LocalFiles, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest
        self._verified: set[int] = set()
        named = self._named()
        self._check_objects()
        about = {"format": "pt", "model": manifest.name, "version": str(manifest.version)}
        # The order of safetensors itself: each tensor begins at a multiple of its element's size.
        order = sorted(named.items(), key=lambda item: (-ITEM_SIZES[item[1].dtype], item[0]))
        listed = {name: (DTYPES[view.dtype], view.shape, view.packed_size) for name, view in order}
        self._head, _ = head(listed, about)
        if len(self._head) > HEADER_LIMIT:
            raise self._unfit("its names and shapes alone are too long")
        self._views = [view for _, view in order]
        self.size = len(self._head) + sum(view.packed_size for view in self._views)

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range; each region is verified before its first byte is returned."""
        at = 0
        for size, blocks in self._sources():
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                yield from _clipped(blocks, first, last)
            at += size

    def _sources(self) -> Iterator[tuple[int, Iterator[memoryview]]]:
        yield len(self._head), iter([memoryview(self._head)])
        for view in self._views:
            yield view.packed_size, self._blocks(view)

    def _blocks(self, view: View) -> Iterator[memoryview]:
        if view.region is None:
            return
        region = self._region(view.region)
        if view.strides is None:
            yield region[view.offset : view.offset + view.packed_size]
            return
        import torch

        whole = tensor_at(view, torch.frombuffer(region, dtype=torch.uint8))
        row = view.packed_size // view.shape[0]
        step = max(_GATHER // row, 1)
        for at in range(0, len(whole), step):
            rows = whole[at : at + step]
            size = rows.numel() * rows.element_size()
            yield Span(rows, 0, size, True, view.dtype, list(rows.shape)).read()

    def _region(self, index: int) -> memoryview:
        region = self._manifest.regions[index]
        stored = self._manifest.objects[region.object]
        path = object_path(stored.name)
        # Mapping an object again for each tensor is cheap, and a model may have more objects than
        # a process may have mappings.
        view = self._files.view(path)
        if view is None or len(view) != stored.size:
            raise self._damaged(path, "is not as long as it was")
        block = view[region.start : region.start + region.size]
        if index not in self._verified:
            if memory.digests([block])[0].hex() != region.digest:
                raise self._damaged(path, f"the bytes from {region.start} on are not as saved")
            self._verified.add(index)
        return block

    def _named(self) -> dict[str, View]:
        """Every tensor by its dotted path in the saved value."""
        found: dict[str, View] = {}
        views = self._manifest.tensors
        where = manifest_url(self._files, self._manifest)
        # A server need not have torch.
        value = values.outline(self._manifest.tree, len(views), where, values=False)
        if isinstance(value, values.Number):
            value = {"tensor": value}
        for name, number in values.numbers(value, join=_dotted):
            view = views[number]
            if name in found or name == "__metadata__":
                raise self._unfit(f"two things would be called {name[:80]!r}")
            if view.dtype not in DTYPES:
                raise self._unfit(f"{name[:80]!r} is of the dtype {view.dtype}")
            if view.strides is not None and view.packed_size // view.shape[0] > _ROW:
                raise self._unfit(f"{name[:80]!r} has gaps and very long rows")
            found[name] = view
        return found

    def _check_objects(self) -> None:
        """Find a missing object before the first byte is sent."""
        for stored in self._manifest.objects:
            path = object_path(stored.name)
            if self._files.size(path) != stored.size:
                raise self._damaged(path, "is missing or not as long as it was")

    def _unfit(self, what: str) -> SerializationError:
        return SerializationError(f"{self._title} is no safetensors file: {what}; {_ADVICE}")

    def _damaged(self, path: str, what: str) -> StoreDamagedError:
        return StoreDamagedError(f"{self._title} is damaged: {path} {what}; take another version")

    @property
    def _title(self) -> str:
        return f"{self._manifest.name!r} version {self._manifest.version}"


def _dotted(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _clipped(blocks: Iterator[memoryview], first: int, last: int) -> Iterator[memoryview]:
    at = 0
    for block in blocks:
        part = block[max(first - at, 0) : max(last - at, 0)]
        for start in range(0, len(part), BLOCK):
            yield part[start : start + BLOCK]
        at += len(block)
        if at >= last:
            return
