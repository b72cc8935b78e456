"""The page's files: what they are served with, what they may hold, and that they fit together."""

import re
from html.parser import HTMLParser

import httpx
import pytest
from darkbloom_webui import server_routes
from darkbloom_webui._routes import CONTENT_SECURITY_POLICY, has_etag, page_files
from toy_server import ToyServer

from darkbloom_core.plugins import PluginReport
from darkbloom_core.server import OpenRoute

FILES = {name: file.content.decode() for name, file in page_files().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
ROUTES = ["/" if name == "index.html" else f"/webui/{name}" for name in FILES]
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
REPORTS = (
    PluginReport(
        name="webui", distribution="darkbloom-webui", version="1", hooks=("server_routes",), state="loaded"
    ),
    PluginReport(
        name="odd", distribution=None, version=None, hooks=(), state="failed to import", reason="it is broken"
    ),
)


class Page(HTMLParser):
    """The elements of the page: (tag, attributes) in order."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def all(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


PAGE = Page(FILES["index.html"])


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    server = ToyServer(
        tmp_path_factory.mktemp("toys"),
        {"toy/plain": {}},
        plugin_routes=server_routes(),
        plugin_reports=lambda: REPORTS,
    )
    with server.running():
        yield server.url


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
def test_a_file_comes_with_its_type_and_the_headers_that_bind_the_browser(client, route):
    answer = client.get(route)
    assert answer.status_code == 200
    name = "index.html" if route == "/" else route.rpartition("/")[2]
    assert answer.content == FILES[name].encode()
    assert answer.headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("route", ROUTES)
def test_head_tells_the_same_without_the_file(client, route):
    whole, head = client.get(route), client.head(route)
    differing = {"date", "x-request-id"}
    assert {key: value for key, value in head.headers.items() if key not in differing} == {
        key: value for key, value in whole.headers.items() if key not in differing
    }
    assert (head.status_code, head.content) == (200, b"")


def test_a_file_that_the_browser_has_is_not_sent_again(client):
    etag = client.get("/").headers["etag"]
    for sent in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = client.get("/", headers={"if-none-match": sent})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200
    assert len({file.etag for file in page_files().values()}) == len(FILES)


@pytest.mark.parametrize("header", ["", '"', "W/", '"ab', "ab", '""', '"*"'])
def test_an_etag_is_met_by_itself_alone(header):
    assert not has_etag(header, '"abc"')


def test_the_plugins_are_told_as_they_are(client):
    answer = client.get("/webui/plugins")
    assert answer.headers["cache-control"] == "no-store"
    told = {plugin["name"]: plugin for plugin in answer.json()["plugins"]}
    assert (told["webui"]["state"], told["webui"]["failed"]) == ("loaded", False)
    assert (told["odd"]["reason"], told["odd"]["failed"]) == ("it is broken", True)


def test_an_unknown_file_is_the_usual_404(client):
    answer = client.get("/webui/../_routes.py")
    assert answer.status_code == 404
    assert client.get("/webui/_routes.py").json()["error"]["code"] == "route_not_found"


def test_the_page_is_smaller_than_100_kilobytes_in_all():
    assert sum(len(file.content) for file in page_files().values()) < 100_000


def test_the_policy_allows_nothing_inline_and_nobody_else():
    sources = dict(part.split(" ", 1) for part in CONTENT_SECURITY_POLICY.split("; "))
    assert sources["default-src"] == "'none'"
    assert sources["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    for name in ("script-src", "style-src", "connect-src"):
        assert sources[name] == "'self'"
    assert sources["img-src"] == "'self' data:"


def test_nothing_is_loaded_from_elsewhere():
    for name, text in FILES.items():
        named = {found for found in re.findall(r"[a-z]*:?//[\w.-]+", text) if not found.startswith("//")}
        assert named <= {"http://www.w3.org"}, name
        assert not re.search(r"@import|url\((?!#)", text), name
    for target in (*PAGE.all("src"), *PAGE.all("href")):
        assert target.startswith("#") or target.removeprefix("webui/") in FILES, target


def test_nothing_stands_inline_that_the_policy_would_stop():
    for tag, attributes in PAGE.elements:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or "src" in attributes


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_can_read_text_as_html_or_code(name):
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\b|\bFunction\("
        r"|createContextualFragment|setHTML|javascript:"
    )
    assert not re.search(forbidden, SCRIPTS[name])


def test_scripts_and_page_fit_together():
    """Every id that a script asks for is in the page, every import in the package, every name in its module."""
    ids = PAGE.all("id")
    assert len(ids) == len(set(ids))
    for name, text in SCRIPTS.items():
        assert set(re.findall(r"byId\('([\w-]+)'\)", text)) <= set(ids), name
        icons = {f"icon-{icon}" for icon in re.findall(r"\bicon\('(\w+)'\)", text)}
        assert icons <= set(ids), name
        for names, module in re.findall(r"import \{([^}]*)\} from '\./([\w.]+)'", text):
            for each in filter(None, (part.strip() for part in names.split(","))):
                assert re.search(
                    rf"export (?:const|class|function\*?|async function\*?) {each}\b", FILES[module]
                )


def test_every_field_and_every_region_has_a_name():
    ids, labelled = set(PAGE.all("id")), set(PAGE.all("for"))
    for tag, attributes in PAGE.elements:
        if tag in ("textarea", "select") or (
            tag == "input" and attributes.get("type") not in ("file", "checkbox")
        ):
            assert attributes["id"] in labelled
        if tag in ("section", "nav", "dialog", "form") and attributes:
            assert {"aria-label", "aria-labelledby"} & attributes.keys()
    named = " ".join([*PAGE.all("aria-labelledby"), *PAGE.all("aria-describedby"), *labelled])
    assert set(named.split()) <= ids


def luminance(colour):
    """Relative luminance as WCAG 2.2 defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


TEXT_PAIRS = [
    *((ink, ground) for ink in ("ink", "soft") for ground in ("page", "raised", "sunken")),
    ("accent", "page"), ("accent", "raised"), ("accent", "tint"), ("on-accent", "accent"), ("soft", "line"),
    ("good", "good-tint"), ("bad", "bad-tint"), ("busy", "busy-tint"), ("bad", "raised"), ("ink", "tint"),
]  # fmt: skip
DRAWN_PAIRS = [
    ("edge", "page"), ("edge", "raised"), ("accent", "sunken"), ("share-1", "sunken"), ("share-2", "sunken"),
    ("share-3", "sunken"),
]  # fmt: skip


@pytest.mark.parametrize("appearance", [0, 1], ids=["light", "dark"])
def test_colours_contrast_as_much_as_wcag_aa_asks(appearance):
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", FILES["style.css"])
    colours = {name: both[appearance] for name, *both in pairs}
    for least, found in ((4.5, TEXT_PAIRS), (3.0, DRAWN_PAIRS)):
        for one, other in found:
            assert contrast(colours[one], colours[other]) >= least, (one, other)


def test_the_page_opens_without_a_key_and_what_it_shows_does_not() -> None:
    assert {route.path for route in server_routes() if isinstance(route, OpenRoute)} == set(ROUTES)
    assert {route.path for route in server_routes()} - set(ROUTES) == {"/webui/plugins"}
