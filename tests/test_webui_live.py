"""The web page in a real browser, against real servers: the demo checkpoints, and models that say what a script says."""

import base64
import re

import pytest

pytestmark = pytest.mark.system

TOOLS = """[{"name": "get_weather", "description": "Get the current weather in a city.", "parameters": {"type": "object",
 "properties": {"city": {"type": "string", "description": "The city name"}}, "required": ["city"]}}]"""

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
EVIL_MODEL = "<b onclick=alert(3)>evil</b>"
MARKDOWN = (
    "# Title\n\nSome **bold**, *thin* and `co<b>de`, a [link](https://example.org/a) and "
    "[none](javascript:alert`4`), [nor](data:text/html,x).\n\n"
    "- one\n- two\n  1. inner\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\n> said\n\n```python\nx = '<i>'\n"
)
KEY = "ann-0123456789abcdef"
SCRIPTS = {
    "evil": [EVIL, "![p](http://127.0.0.1:9/p.png)"],
    "markdown": [MARKDOWN, "y = 1\n", "```\n", "last\n"],
    "slow": ["a", *["·"] * 20, "z"],
    "long": ["word\n\n" * 80],
    "break": ["half ", {"break": True}],
    "call": [{"think": True}, "Which tool?", {"call": "<i>look"}, '{"at": "<u>"', ', "n": 1}'],
    "found": ["It was found."],
}


@pytest.fixture(scope="module")
def browser():
    from browser import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory):
    from darkbloom_webui import server_routes
    from scripted import ScriptedFamily
    from toy_server import ToyServer

    from darkbloom_core.plugins import PluginReport

    evil = PluginReport(name=EVIL, distribution=None, version=None, hooks=(), state="failed", reason=EVIL)
    fast, slow = {"scripts": SCRIPTS}, {"scripts": SCRIPTS, "seconds": 0.04}
    server = ToyServer(
        tmp_path_factory.mktemp("scripted"),
        {"fast": fast, "slow": slow, EVIL_MODEL: fast},
        plugin_routes=server_routes(),
        plugin_reports=lambda: (evil,),
        family=ScriptedFamily,
    )
    with server.running():
        yield server


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory):
    from darkbloom_webui import server_routes
    from scripted import ScriptedFamily
    from toy_server import ToyServer

    server = ToyServer(
        tmp_path_factory.mktemp("locked"),
        {"locked": {"scripts": {"found": ["It was found."]}}},
        plugin_routes=server_routes(),
        family=ScriptedFamily,
        keys={"ann": KEY},
        server={"key_requests_per_minute": 1, "key_burst": 1},
    )
    with server.running():
        yield server


class Chat:
    """A tab with the page. At the end it must have asked nobody else, and have raised no error."""

    def __init__(self, browser, url, **options):
        self.url, self.asked, self.faults, self.dialogs = url, [], [], []
        self.context = browser.new_context(**{"viewport": {"width": 1000, "height": 720}, **options})
        self.context.set_default_timeout(15_000)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("dialog", self._dialog)
        self.open()

    def _console(self, message):
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def _dialog(self, dialog):
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, view=""):
        self.page.goto(f"{self.url}/{view}")
        self.ready()

    def ready(self):
        """Wait until the page knows the models, or asks for a key."""
        self.page.locator("#model:enabled, #key-dialog[open]").first.wait_for(state="attached")

    @property
    def message(self):
        return self.page.get_by_role("textbox", name="Message", exact=True)

    @property
    def answer(self):
        """The last answer."""
        return self.page.locator(".answer").last

    def choose(self, model):
        self.page.get_by_label("Model", exact=True).select_option(model)

    def send(self, text):
        self.message.fill(text)
        self.message.press("Enter")

    def ask(self, text):
        """The text of the whole answer."""
        self.send(text)
        self.finished()
        return self.answer.locator(".text").inner_text()

    def finished(self):
        self.page.locator(".answer[aria-busy=false] >> nth=-1").wait_for()
        self.page.get_by_role("button", name="Send", exact=True).wait_for()

    def close(self):
        self.context.close()
        assert self.faults == []
        assert self.dialogs == []
        assert [url for url in self.asked if not url.startswith((self.url, "data:"))] == []


@pytest.fixture
def open_chat(browser):
    opened = []

    def open_chat(server, **options):
        opened.append(Chat(browser, server.url, **options))
        return opened[-1]

    yield open_chat
    for chat in opened:
        chat.close()


@pytest.fixture
def demo(open_chat, quick_server):
    return open_chat(quick_server)


@pytest.fixture
def scripted(open_chat, scripted_server):
    chat = open_chat(scripted_server)
    chat.choose("fast")
    return chat


def test_an_answer_is_right_its_reasoning_folded_and_its_tokens_counted(demo):
    demo.choose("demo/gpt-oss")
    assert demo.ask("What is 47 plus 38?") == "47 + 38 = 85"
    thoughts = demo.answer.locator("details")
    assert thoughts.locator(".plain").is_hidden()
    summary = thoughts.locator("summary")
    assert re.fullmatch(r"Thought for \d+ tokens", summary.inner_text())
    summary.focus()
    demo.page.keyboard.press("Enter")
    assert "15" in thoughts.locator(".plain").inner_text()
    figures = demo.answer.locator(".figures").inner_text()
    assert re.fullmatch(r"\d+ tokens · (?:[\d,]+ tokens/s · )?first after [\d.]+ s · prompt \d+.*", figures)


def test_a_conversation_goes_on_is_kept_in_the_tab_and_begins_anew(demo):
    demo.choose("demo/gpt-oss")
    assert demo.ask("My name is Ann.") == "Nice to meet you, Ann!"
    demo.page.reload()
    demo.ready()
    assert demo.page.locator(".answer .text").all_inner_texts() == ["Nice to meet you, Ann!"]
    assert demo.ask("What is my name?") == "Your name is Ann."
    demo.page.get_by_role("button", name="New chat").click()
    demo.page.get_by_role("heading", name="Ask demo/gpt-oss").wait_for()
    demo.page.reload()
    assert demo.page.locator(".answer").count() == 0


def test_a_question_about_a_picture_is_answered(demo):
    from seeing import question

    asked = question("colour", 3)
    data = base64.b64decode(asked.uris[0].partition(",")[2])
    demo.choose("demo/gemma4")
    demo.page.set_input_files(
        "#picture-files", {"name": "shape.png", "mimeType": "image/png", "buffer": data}
    )
    demo.page.get_by_role("img", name="shape.png").wait_for()
    assert demo.ask(asked.text) == asked.answer
    sent = demo.page.locator(".question").get_by_role("img", name="shape.png")
    assert sent.evaluate("image => image.complete && image.naturalWidth") == 240
    assert demo.page.locator("#pictures").is_hidden()


def test_pictures_are_pasted_dropped_taken_away_and_other_files_refused(demo):
    demo.choose("demo/gemma4")
    give = """([how, name, type]) => {
        const data = new DataTransfer();
        data.items.add(new File(['x'], name, {type}));
        const event = how === 'paste'
            ? new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})
            : new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true});
        document.querySelector('#message').dispatchEvent(event);
    }"""
    demo.page.evaluate(give, ["paste", "pasted.png", "image/png"])
    demo.page.evaluate(give, ["drop", "dropped.png", "image/png"])
    pictures = demo.page.locator("#pictures li")
    pictures.nth(1).wait_for()
    assert [image.get_attribute("alt") for image in pictures.locator("img").all()] == [
        "pasted.png",
        "dropped.png",
    ]
    demo.page.get_by_role("button", name="Remove pasted.png").click()
    demo.page.evaluate(give, ["drop", "notes.txt", "text/plain"])
    demo.page.get_by_role("alert").filter(has_text="notes.txt is no picture").wait_for()
    assert pictures.count() == 1
    demo.choose("demo/gpt-oss")
    assert demo.page.get_by_role("button", name="Add pictures").is_disabled()


def test_a_tool_is_called_and_its_result_answered(demo):
    demo.choose("demo/gpt-oss")
    demo.page.get_by_role("button", name="Options").click()
    demo.page.get_by_label("Tools the model may call").fill("[")
    demo.page.get_by_role("button", name="Done").click()
    demo.page.get_by_role("alert").filter(has_text="Tools:").wait_for()
    demo.page.get_by_label("Tools the model may call").fill(TOOLS)
    demo.page.get_by_role("button", name="Done").click()
    demo.ask("What is the weather in Oslo?")
    assert demo.answer.locator(".call-name").inner_text() == "Calls get_weather"
    assert re.sub(r"\s", "", demo.answer.locator(".call pre").inner_text()) == '{"city":"Oslo"}'
    demo.page.get_by_label("Result of get_weather").fill('{"weather": "sunny", "degrees": 21}')
    demo.page.get_by_role("button", name="Send the result").click()
    demo.page.locator(".answer >> nth=1").wait_for()
    demo.finished()
    assert "sunny" in demo.answer.locator(".text").inner_text()


def test_the_server_shows_its_models_with_their_shares_and_its_plugins(demo):
    demo.page.get_by_role("link", name="Server").click()
    cards = demo.page.locator("#slots .card")
    cards.nth(1).wait_for()
    assert [card.locator("h3 span").first.inner_text() for card in cards.all()] == [
        "demo/gemma4",
        "demo/gpt-oss",
    ]
    assert cards.locator(".badge").all_inner_texts() == ["serving", "serving"]
    shares = re.findall(r"(\d+) %", demo.page.locator("#memory").inner_text())
    assert len(shares) == 2
    assert abs(sum(map(int, shares)) - 100) <= 1
    assert re.search(r"room for [\d,]+ tokens", cards.first.inner_text())
    assert "Ready · 2 of 2 models in memory" in demo.page.locator("#server-state").inner_text()
    names = demo.page.locator("#plugins h3 span:first-child").all_inner_texts()
    assert {"dialects", "gemma4", "gpt-oss", "webui"} <= set(names)


def test_an_answer_is_shown_as_it_comes_and_can_be_stopped_and_asked_for_again(scripted):
    scripted.choose("slow")
    scripted.send("slow")
    scripted.answer.locator(".text", has_text="a··").wait_for()
    assert "z" not in scripted.answer.inner_text()
    assert scripted.answer.get_attribute("aria-busy") == "true"
    scripted.page.keyboard.press("Escape")
    scripted.answer.get_by_text("Stopped.").wait_for()
    assert "z" not in scripted.answer.locator(".text").inner_text()
    scripted.choose("fast")
    scripted.answer.get_by_role("button", name="Answer again").click()
    scripted.answer.locator(".text", has_text=f"a{'·' * 20}z").wait_for()
    assert scripted.page.locator(".answer").count() == 1


def test_text_of_a_model_is_never_read_as_html(scripted):
    scripted.choose(EVIL_MODEL)
    scripted.page.get_by_role("heading", name=f"Ask {EVIL_MODEL}").wait_for()
    assert scripted.ask("evil").startswith(EVIL)
    scripted.page.get_by_role("heading", name=f"{EVIL_MODEL} answered").wait_for()
    assert scripted.page.locator(".answer img, .answer script").count() == 0
    scripted.ask("call")
    assert scripted.answer.locator(".call-name").inner_text() == "Calls <i>look"
    assert "<u>" in scripted.answer.locator(".call pre").inner_text()
    scripted.page.get_by_role("link", name="Server").click()
    card = scripted.page.locator("#plugins .card")
    card.wait_for()
    assert EVIL_MODEL in scripted.page.locator("#slots h3 span").all_inner_texts()
    assert card.locator("h3 span").first.inner_text() == EVIL
    assert card.locator(".fault").inner_text() == EVIL


def test_markdown_is_shown_as_what_it_means(scripted):
    scripted.ask("markdown")
    text = scripted.answer.locator(".text")
    assert text.locator("h3").inner_text() == "Title"
    assert text.locator("strong").all_inner_texts() == ["bold", "2"]
    assert text.locator("em").inner_text() == "thin"
    assert text.locator("p > code").inner_text() == "co<b>de"
    assert text.locator("a").evaluate_all("links => links.map(a => [a.href, a.rel])") == [
        ["https://example.org/a", "noopener noreferrer nofollow"]
    ]
    assert "[none](javascript:alert`4`), [nor](data:text/html,x)." in text.inner_text()
    assert text.locator("ul > li").all_inner_texts()[0] == "one"
    assert text.locator("ul ol > li").inner_text() == "inner"
    assert text.locator("td").all_inner_texts() == ["1", "2"]
    assert text.locator("blockquote").inner_text() == "said"
    assert text.locator("pre").inner_text() == "x = '<i>'\ny = 1"
    assert text.locator("> p").last.inner_text() == "last"


def test_an_answer_that_breaks_off_keeps_what_there_was_and_can_be_tried_again(scripted):
    assert scripted.ask("break").strip() == "half"
    fault = scripted.answer.locator(".fault")
    assert "Something went wrong in the server" in fault.inner_text()
    assert fault.get_by_role("button", name="Try again").is_visible()
    scripted.page.get_by_role("status").filter(has_text="Something went wrong").wait_for()


def test_an_answer_whose_connection_ends_early_is_no_whole_answer(scripted):
    chunk = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": null}]}\n\n'
    scripted.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=chunk),
    )
    assert scripted.ask("found") == "half"
    assert "The answer broke off" in scripted.answer.locator(".fault").inner_text()


def test_a_refusal_says_why_and_a_turn_without_an_answer_is_not_told_again(demo):
    def limit(tokens):
        demo.page.get_by_role("button", name="Options").click()
        demo.page.get_by_label("Longest answer, in tokens").fill(tokens)
        demo.page.get_by_role("button", name="Done").click()

    def prompt_tokens():
        return re.search(r"prompt (\d+)", demo.answer.locator(".figures").inner_text())[1]

    demo.choose("demo/gpt-oss")
    assert demo.ask("What is 12 + 30?") == "12 + 30 = 42"
    alone = prompt_tokens()
    demo.page.get_by_role("button", name="New chat").click()
    limit("10000000")
    demo.ask("My name is Ann.")
    fault = demo.answer.locator(".fault").inner_text()
    assert "The server did not accept this" in fault
    assert "131072" in fault
    limit("")
    assert demo.ask("What is 12 + 30?") == "12 + 30 = 42"
    assert prompt_tokens() == alone


def test_a_server_that_cannot_be_reached_is_said_and_tried_again(scripted):
    scripted.context.set_offline(True)
    scripted.ask("found")
    assert "The server cannot be reached" in scripted.answer.locator(".fault").inner_text()
    scripted.context.set_offline(False)
    scripted.answer.get_by_role("button", name="Try again").click()
    scripted.answer.get_by_text("It was found.").wait_for()


def test_a_server_with_keys_is_used_once_the_key_is_entered(open_chat, locked_server):
    chat = open_chat(locked_server)
    dialog = chat.page.get_by_role("dialog", name="API key")
    for key in ("wrong-0123456789abcdef", KEY):
        assert focused(chat.page) == "Key"
        dialog.get_by_label("Key", exact=True).fill(key)
        dialog.get_by_role("button", name="Use this key").click()
        if key != KEY:
            dialog.get_by_role("alert").wait_for()
    dialog.wait_for(state="hidden")
    chat.page.locator("#model:enabled").wait_for()
    assert chat.ask("found") == "It was found."
    chat.ask("found")
    fault = chat.answer.locator(".fault").inner_text()
    assert "The server is busy" in fault
    assert re.search(r"It asks to wait \d+ seconds\.", fault)
    chat.open("#server")
    assert "room for" in chat.page.locator("#slots .card").inner_text()
    assert KEY not in chat.page.evaluate("JSON.stringify(localStorage)")
    other = open_chat(locked_server)
    other.page.get_by_role("button", name="Close").click()
    other.page.get_by_role("link", name="Server").click()
    other.page.locator("#server-fault").get_by_text("asks for an API key").wait_for()
    assert other.page.locator("#slots .card").count() == 0


def focused(page):
    """The name of what has the focus, as a screen reader would say it."""
    return page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).innerText.trim()")


def go_to(page, name, key="Tab"):
    """Press ``key`` until what is called ``name`` has the focus; gives what had it on the way."""
    passed = []
    while focused(page) != name:
        passed.append(focused(page))
        assert len(passed) < 40, passed
        page.keyboard.press(key)
    return passed


def test_everything_can_be_done_with_the_keyboard(scripted):
    page = scripted.page
    assert focused(page) == "Message"
    page.keyboard.type("markdown")
    page.keyboard.press("Shift+Enter")
    assert scripted.message.input_value() == "markdown\n"
    page.keyboard.press("Enter")
    scripted.finished()
    assert go_to(page, "Model") == ["Message", "Options"]
    go_to(page, "Options", "Shift+Tab")
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Options").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog", name="Options").wait_for(state="hidden")
    go_to(page, "Answer again", "Shift+Tab")
    page.keyboard.press("Space")
    scripted.finished()
    assert focused(page) == "Message"
    go_to(page, "Server", "Shift+Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Server", exact=True).wait_for()
    assert page.evaluate("document.activeElement.tagName") == "H1"
    passed = go_to(page, "Skip to the message box", "Shift+Tab")
    assert passed == ["Server", "New chat", "Server", "Chat", "darkbloom"]


def test_the_first_stop_is_seen_and_leads_to_the_message_box(scripted):
    assert go_to(scripted.page, "Skip to the message box", "Shift+Tab")[-2:] == ["Chat", "darkbloom"]
    assert scripted.page.get_by_role("link", name="Skip to the message box").bounding_box()["y"] > 0
    scripted.page.keyboard.press("Enter")
    assert focused(scripted.page) == "Message"


def test_a_screen_reader_finds_names_headings_and_the_answer_once(scripted):
    scripted.ask("call")
    page = scripted.page
    told = page.locator("body").aria_snapshot()
    for line in (
        '- navigation "Views"',
        "- main",
        '- heading "Chat" [level=1]',
        '- heading "You asked" [level=2]',
        '- heading "fast answered" [level=2]',
        '- textbox "Message"',
        '- combobox "Model"',
    ):
        assert line in told, told
    assert not re.search(r"- (?:button|link|textbox|combobox|img|spinbutton|checkbox)(?::|$| \[)", told), told
    page.get_by_role("status").filter(has_text="fast calls <i>look.").wait_for()
    scripted.ask("found")
    page.get_by_role("status").filter(has_text="fast answered: It was found.").wait_for()
    assert page.locator("[aria-live], [role=log]").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("appearance", ["light", "dark"])
def test_the_page_fits_a_narrow_screen_and_its_owners_wishes(open_chat, scripted_server, appearance):
    chat = open_chat(
        scripted_server,
        viewport={"width": 320, "height": 640},
        color_scheme=appearance,
        reduced_motion="reduce",
        has_touch=True,
    )
    chat.choose("fast")
    chat.ask("markdown")
    chat.ask("long")
    chat.page.evaluate("window.scrollTo(0, 0)")
    chat.page.get_by_role("button", name="Go to the latest message").click()
    chat.page.locator("#to-latest").wait_for(state="hidden")
    chat.page.get_by_role("button", name="Options").click()
    for view in ("", "#server"):
        assert chat.page.evaluate("document.documentElement.scrollWidth") == 320, view
        small = chat.page.evaluate("""[...document.querySelectorAll('button, select, nav a, summary')]
            .filter(each => each.checkVisibility() && each.getBoundingClientRect().height < 24)
            .map(each => each.outerHTML)""")
        assert small == []
        chat.open("#server")
        chat.page.locator("#slots .card").first.wait_for()
    ground = chat.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert (brightness > 128) == (appearance == "light")
    assert chat.page.evaluate("document.getAnimations().length") == 0
