"""Test the web page in a real browser: streaming, stopping, hostile replies, mobile, keyboard, no external requests."""

import json
import time
from collections.abc import Iterator

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.settings import ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.browser import CHROMIUM, Browser
from tests.support.served import ScriptedEngine, Served, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
IDLE = "!document.querySelector('.busy') && document.querySelectorAll('.assistant .note').length === {}"
BODY = "[...document.querySelectorAll('.assistant .body')].at(-1)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def meet(browser: Browser, served: Served) -> None:
    browser.resize(1000, 760)
    browser.requested.clear()
    browser.open(f"{served.url}/")
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.open(f"{served.url}/")
    browser.wait("document.title.startsWith('pico')")


def ask(browser: Browser, text: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter", 13, "\r")


def test_a_conversation_streams_and_goes_on(browser: Browser, served: Served) -> None:
    meet(browser, served)
    assert browser.run("document.activeElement.id") == "prompt"
    browser.run("document.getElementById('temperature').value = '0'")
    ask(browser, "What is the capital of Japan?")
    browser.wait(IDLE.format(1))
    assert browser.run(f"{BODY}.textContent") == "The capital of Japan is Tokyo."
    note = browser.run("document.querySelector('.assistant .note').textContent")
    assert "tokens/s" in note and "first after" in note
    ask(browser, "What is 7 times 8?")
    browser.wait(IDLE.format(2))
    assert browser.run("history.length") == 4  # both questions were sent with both previous answers
    browser.wait("/running · \\d+ waiting · cache \\d+ %/.test(document.getElementById('state').textContent)")
    assert {one.removeprefix(served.url) for one in browser.requested} <= {
        "/", "/v1/models", "/health", "/v1/chat/completions", "data:,",
    }  # fmt: skip
    browser.press("n", 78, code="KeyN", modifiers=1)
    browser.wait("document.querySelectorAll('.turn').length === 0")


def test_conversations_are_kept_in_the_browser(browser: Browser, served: Served) -> None:
    meet(browser, served)
    browser.run("document.getElementById('temperature').value = '0'")
    ask(browser, "What is the capital of Japan?")
    browser.wait(IDLE.format(1))
    browser.open(f"{served.url}/")  # a reload
    browser.wait("document.querySelectorAll('.turn').length === 2")
    assert browser.run(f"{BODY}.textContent") == "The capital of Japan is Tokyo."
    browser.run("fresh()")
    assert browser.run("document.querySelectorAll('.turn').length") == 0
    browser.run("reopen(stored()[0].id)")
    assert browser.run("history.length") == 2


@pytest.mark.parametrize("how", ["button", "key"])
def test_a_reply_is_stopped(browser: Browser, loaded: LoadedModel, how: str) -> None:
    engine = ScriptedEngine(lambda request: [90] * 5000, pause=0.01)
    with serving(loaded, engine) as served:
        meet(browser, served)
        ask(browser, "Go")
        browser.wait(f"{BODY} && {BODY}.textContent.length > 5")
        if how == "key":
            browser.press("Escape", 27)
        else:
            browser.run("document.getElementById('stop').click()")
        browser.wait(IDLE.format(1))
        assert "stopped" in browser.run("document.querySelector('.assistant .note').textContent")
        served.idle()
        assert engine.cancelled == [1] and browser.run("!document.getElementById('send').hidden")


HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\n\n'
    "[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) [c](data:text/html,x) [d](vbscript:x)\n\n"
    '[e](https://example.org/" onclick="window.hacked=1) **<b onmouseover=window.hacked=1>**\n\n'
    "```html\n<svg onload=window.hacked=1>\n```\n\n| <i>a</i> | b |\n|---|---|\n| <u>1</u> | [f](javascript:1) |\n\n"
    "# <h1 onclick=x>\n\n- <a href=javascript:1>x</a>\n\n> <iframe src=javascript:1>\n\nhttps://example.org/ok\n"
)


def test_what_a_model_writes_never_runs(browser: Browser, scripted: Scripted) -> None:
    with scripted(HOSTILE) as served:
        meet(browser, served)
        ask(browser, "Go")
        browser.wait(IDLE.format(1))
        assert browser.run("window.hacked") is None
        tags = browser.run(f"[...{BODY}.querySelectorAll('*')].map((node) => node.tagName)")
        assert not set(tags) & {"IMG", "SCRIPT", "SVG", "IFRAME", "U", "I", "B"}
        addresses = browser.run(f"[...{BODY}.querySelectorAll('a')].map((node) => node.href)")
        assert addresses and all(one.startswith("https://example.org/") for one in addresses)
        attributes = browser.run(
            f"[...{BODY}.querySelectorAll('*')].flatMap((node) => [...node.attributes].map((a) => a.name))"
        )
        assert set(attributes) <= {"href", "target", "rel", "type", "start", "class"}
        assert "window.hacked" in browser.run(f"{BODY}.textContent")


def test_markup_is_shown(browser: Browser, scripted: Scripted) -> None:
    text = (
        "# T\n\n**b** *i* `c` ~~d~~ [l](https://a.example/)\n\n- x\n- y\n  - z\n\n1. p\n\n"
        "> q\n\n```py <i>\na < b\n```\n\n|h|n|c|\n|-|-:|:-:|\n|v|1|2|\n"
    )
    with scripted(text) as served:
        meet(browser, served)
        ask(browser, "Go")
        browser.wait(IDLE.format(1))
        for css in (
            "h1",
            "strong",
            "em",
            "del",
            "p code",
            "p a",
            "ul ul li",
            "ol li",
            "blockquote p",
            "pre code",
            "th",
            "td",
            "td.right + td.center",
        ):
            assert browser.run(f"{BODY}.querySelector({json.dumps(css)}) !== null"), css
        assert browser.run(f"{BODY}.querySelector('pre code').textContent") == "a < b"
        assert browser.run(f"{BODY}.querySelector('.code span').textContent") == "py <i>"


def test_reasoning_is_folded(browser: Browser, scripted: Scripted) -> None:
    with scripted("<think>\nhidden thought\n</think>\n\nThe answer.") as served:
        meet(browser, served)
        ask(browser, "Go")
        browser.wait(IDLE.format(1))
        assert browser.run(f"{BODY}.textContent") == "The answer."
        assert browser.run("document.querySelector('.assistant details').open") is False
        assert browser.run("document.querySelector('.assistant details div').textContent").strip() == "hidden thought"


def test_a_long_reply_does_not_stall_the_page(browser: Browser, served: Served) -> None:
    """The reply of 20,000 mixed characters renders in a moment, and unmatched markers cost nothing."""
    meet(browser, served)
    for text in (
        "word **bold** `code` [l](https://a.b) \n" * 500,
        "`" * 20_000,
        "`a" * 10_000,
        "**a " * 5_000,
        "[" * 20_000,
        "> " * 5_000,
    ):
        began = time.monotonic()
        browser.run(f"document.createElement('div').append(markdown({json.dumps(text)}))")
        assert time.monotonic() - began < 20  # detects a hang, not slowness: each takes milliseconds


def test_of_a_long_conversation_the_talk_scrolls_and_not_the_page(browser: Browser, scripted: Scripted) -> None:
    with scripted("word " * 4000, context=1 << 15) as served:
        meet(browser, served)
        for turn in (1, 2):
            ask(browser, "Go")
            browser.wait(IDLE.format(turn))
        assert browser.run(f"{BODY}.textContent.length") > 19_990
        assert browser.run("document.documentElement.scrollHeight") <= 760
        talk = "document.getElementById('talk')"
        assert browser.run(f"{talk}.scrollHeight - {talk}.scrollTop - {talk}.clientHeight") < 80  # its end is visible


def test_settings_are_sent(browser: Browser, loaded: LoadedModel) -> None:
    seen = []

    def script(request: object) -> list[int]:
        seen.append(request)
        return [90]

    with serving(loaded, ScriptedEngine(script)) as served:  # type: ignore[arg-type]  # of any request
        meet(browser, served)
        values = {
            "temperature": "0.5",
            "top_p": "0.7",
            "top_k": "9",
            "max_tokens": "33",
            "seed": "4",
            "system": "Brief.",
        }
        for name, value in values.items():
            browser.run(f"document.getElementById('{name}').value = {json.dumps(value)}")
        ask(browser, "Go")
        browser.wait(IDLE.format(1))
        (request,) = seen
        drawn = request.sampling
        assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (0.5, 0.7, 9, 4)
        assert request.limit == 33 and "Brief." in loaded.tokenizer.decode(request.prompt)


def test_a_refusal_is_said_and_the_question_given_back(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi") as served:
        meet(browser, served)
        served.service.draining = True
        ask(browser, "My question")
        browser.wait(IDLE.format(1))
        assert "shutting down" in browser.run("document.querySelector('.error').textContent")
        assert browser.run("document.getElementById('prompt').value") == "My question"
        assert browser.run("history.length") == 0


def test_a_key_is_asked_for(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi", settings=ServerSettings(("pico",), key=b"the-key")) as served:
        browser.resize(1000, 760)
        browser.open(f"{served.url}/")
        browser.wait("document.getElementById('settings').open && !document.getElementById('keyed').hidden")
        browser.run(
            "const key = document.getElementById('key'); key.value = 'the-key'; key.dispatchEvent(new Event('change'))"
        )
        browser.wait("document.title.startsWith('pico')")
        ask(browser, "Go")
        browser.wait(IDLE.format(1))
        assert browser.run(f"{BODY}.textContent") == "Hi"


def test_on_a_phone_everything_is_within_reach(browser: Browser, scripted: Scripted) -> None:
    with scripted("```\n" + "x" * 500 + "\n```\n" + "y" * 500) as served:
        meet(browser, served)
        browser.resize(360, 640, "dark")
        ask(browser, "Go")
        browser.wait(IDLE.format(1))
        assert browser.run("document.documentElement.scrollWidth") <= 360
        box = "document.getElementById('{}').getBoundingClientRect()"
        for name in ("prompt", "send", "fresh"):
            assert browser.run(f"{box.format(name)}.right") <= 360 and browser.run(f"{box.format(name)}.bottom") <= 640
        assert browser.run(f"{box.format('send')}.height") >= 40
