"""Runs the application on a socket: in the foreground until a signal, or in a thread until told to stop.

Stopping always takes the same way: readiness goes off and new requests get 503, what runs
may finish for a while, then it is cancelled, and then the socket closes. The while is
``drain_seconds`` for SIGTERM and nothing for SIGINT (Ctrl-C).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import TracebackType

import uvicorn
from starlette.applications import Starlette

from darkbloom_core.errors import SetupError
from darkbloom_core.server._app import generation_service
from darkbloom_core.settings import Settings, read_keys, require_key

CANCEL_SECONDS = 1.0
"""How long cancelled requests get to send their last words, and then connections to close."""

KEEP_ALIVE_SECONDS = 75
"""Longer than common clients keep an idle connection, so that it is they who close it."""


def serve(
    app: Starlette,
    host: str,
    port: int,
    *,
    drain_seconds: float,
    when_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT. Call it on the main thread.

    ``port`` 0 takes a free one; ``when_ready`` is called with the server's real URL.
    Raises ``SetupError`` if the address cannot be had, or if others can reach it and no key is needed.
    """
    require_key(host, needs_key=app.state.needs_key)
    listener = _listen(host, port)
    server = _Server(app, listener)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, server.stop, 0.0)
        loop.add_signal_handler(signal.SIGTERM, server.stop, drain_seconds)
        await server.run(lambda: when_ready(_url(listener)))

    with listener:
        asyncio.run(run())


def check_address(settings: Settings) -> None:
    """Raise ``SetupError`` if the address could not be served now, before anything slow is begun."""
    host = settings.server.host
    require_key(host, needs_key=bool(read_keys(settings)))
    _listen(host, settings.server.port).close()


class BackgroundServer:
    """The server in a thread of this process, for the demo and for tests.

    ::

        with BackgroundServer(app) as server:
            print(server.url)
    """

    def __init__(self, app: Starlette, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises ``SetupError`` as ``serve`` does."""
        require_key(host, needs_key=app.state.needs_key)
        self._listener = _listen(host, port)
        self._server = _Server(app, self._listener)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="http server", daemon=True)
        self.url = _url(self._listener)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> BackgroundServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Stop as for a signal and wait for the end. Idempotent."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended between the check and the call
                self._loop.call_soon_threadsafe(self._server.stop, drain_seconds)
        self._thread.join()

    def _run(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.run(self._started.set)

        try:
            with self._listener:
                asyncio.run(run())
        finally:
            self._started.set()


class _Server:
    """uvicorn on one listening socket, with our way of stopping instead of its own."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(CANCEL_SECONDS),
        )
        self._uvicorn = _Uvicorn(config)
        self._listener = listener
        self._service = generation_service(app)
        self._stop = asyncio.Event()
        self._drain_seconds = 0.0

    def stop(self, drain_seconds: float) -> None:
        """Begin to stop; a second call may only shorten the wait. Call it on the loop."""
        if self._stop.is_set():
            self._service.cancel_all()
        self._drain_seconds = drain_seconds
        self._stop.set()

    async def run(self, when_ready: Callable[[], None]) -> None:
        """Serve until ``stop``."""
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        if not serving.done():
            when_ready()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        self._service.drain()
        if self._drain_seconds > 0:
            await self._service.wait_until_idle(self._drain_seconds)
        self._service.cancel_all()
        await self._service.wait_until_idle(CANCEL_SECONDS)
        self._uvicorn.should_exit = True
        await serving
        self._service.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are ours: uvicorn would raise them again and spoil the exit code."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SetupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    # Connections inherit it. asyncio sets it only for sockets that name their protocol, and without it
    # a small write waits for the client to acknowledge the one before: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
