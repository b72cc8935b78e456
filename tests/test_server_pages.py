"""Pages of the web do not get at a server that needs no key, whatever a browser sends for them."""

import httpx
import pytest
from starlette.datastructures import Headers

from darkbloom_core.errors import OriginNotAllowed
from darkbloom_core.server._pages import Pages

CHAT = {"model": "toy/plain", "messages": [{"role": "user", "content": "HELLO"}], "max_tokens": 1}


def may(method="POST", *, origins=(), **headers) -> bool:
    try:
        Pages(origins).check(method, Headers(headers))
    except OriginNotAllowed:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST", "localhost.", "chat.localhost", "[::1]:8000",
        "192.168.1.5:8000", "darkbloom:8000", "",
    ],
)  # fmt: skip
def test_addresses_and_names_of_this_machine_are_answered(host):
    assert may(host=host)
    assert may("GET", host=host)


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "127.0.0.1.nip.io", "localhost.evil.example", "a.b", "127.0.0.1.", "[::1", "a.b:x"],
)
def test_a_page_that_gives_its_own_name_this_machines_address_gets_nothing(host):
    assert may("GET", host=host) == may(host=host) == (host == "127.0.0.1.")


def test_a_page_asks_its_own_server_and_others_if_they_are_told_of_it():
    here = {"host": "127.0.0.1:8000"}
    assert may(**here, origin="http://127.0.0.1:8000")
    for origin in (
        "https://evil.example",
        "http://127.0.0.1:3000",
        "http://localhost:8000",
        "null",
        "",
        "http://[::1",
    ):
        assert not may(**here, origin=origin)
        assert not may("DELETE", **here, origin=origin)
        assert may("GET", **here, origin=origin)
    assert not may(host="", origin="null")
    page = "https://chat.example.org"
    assert may(**here, origin=page, origins=[page])
    assert not may(**here, origin="https://evil.example", origins=[page])
    assert may(host="chat.example.org", origin=page, origins=[page])
    assert may(host="any.example", origin="https://evil.example", origins=["*"])


def test_a_browser_is_refused_what_a_page_sends_without_asking_first(toy_server):
    """A form's content type needs no preflight."""
    url = f"{toy_server.url}/v1/chat/completions"
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    refused = httpx.post(url, json=CHAT, headers=page)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    rebound = httpx.get(f"{toy_server.url}/v1/models", headers={"Host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "origin_not_allowed")
    own = {"Origin": toy_server.url, "Content-Type": "text/plain"}
    assert httpx.post(url, json=CHAT, headers=own).status_code == 200
