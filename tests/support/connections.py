"""Connections to a server in this process that a test leaves open, and its end while they are."""

from __future__ import annotations

import json
import socket
import threading


def open_request(server, request: dict, receive_bytes=None) -> socket.socket:
    """A connection over which ``request`` was sent and nothing was read."""
    data = json.dumps(request).encode()
    connection = socket.socket()
    connection.settimeout(10)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", server.background.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def stop_in_background(server, drain_seconds) -> threading.Thread:
    thread = threading.Thread(target=server.background.stop, args=(drain_seconds,))
    thread.start()
    return thread
