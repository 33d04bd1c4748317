"""The page when its user leaves, opens a second tab or loses the server."""

import json
from dataclasses import replace

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.settings import ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.runtime.server.test_page import ask, browser, click, fill, meet, replied, roles, shown, stored
from tests.support.browser import CHROMIUM, Browser
from tests.support.served import ScriptedEngine, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
__all__ = ["browser"]  # the fixture


@pytest.mark.slow
def test_the_open_conversation_may_be_clicked_while_its_reply_streams(browser: Browser, loaded: LoadedModel) -> None:
    with serving(loaded, ScriptedEngine(lambda request: [90] * (5 if len(request.prompt) < 40 else 300))) as served:
        meet(browser, served)
        ask(browser, "One")
        ask(browser, "Two " * 20, 0)
        click(browser, "#conversations .title")
        replied(browser, 2)
        ask(browser, "Three", 3)
        assert [role for role, _ in roles(browser)] == ["user", "assistant"] * 3


def test_a_question_without_an_answer_survives_a_reload(browser: Browser, loaded: LoadedModel) -> None:
    engine = ScriptedEngine(lambda request: [90] * 5)
    with serving(loaded, engine) as served:
        meet(browser, served)
        engine.held.clear()
        ask(browser, "A question", 0)
        browser.wait("document.body.matches('.generating')")
        browser.open(f"{served.url}/")
        browser.wait("document.title.startsWith('pico')")
        engine.held.set()
        assert shown(browser, ".user .text") == ["A question"] and roles(browser) == [("user", "A question")]


def test_messages_of_another_tab_are_not_overwritten(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi") as served:
        meet(browser, served)
        ask(browser, "One")
        (conversation,) = stored(browser)
        conversation["messages"] += [{"role": "user", "content": "Two"}, {"role": "assistant", "content": "Hi"}]
        written = json.dumps(json.dumps([conversation]))
        browser.run(
            f"localStorage.setItem('mycli.conversations', {written}); dispatchEvent(new StorageEvent('storage'))"
        )
        assert shown(browser, ".user .text") == ["One", "Two"]
        ask(browser, "Three", 3)
        assert [text for role, text in roles(browser) if role == "user"] == ["One", "Two", "Three"]


def test_a_server_that_is_gone_is_named(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi") as served:
        meet(browser, served)
    ask(browser, "Hello?", 0)
    browser.wait("!document.getElementById('problem').hidden")
    assert shown(browser, "#problem span") == ["The server cannot be reached."]
    assert browser.run("document.getElementById('prompt').value") == "Hello?"


def test_a_wide_table_scrolls(browser: Browser, scripted: Scripted) -> None:
    row = "| " + "Heading | " * 9
    with scripted(f"{row}\n|{'---|' * 9}\n{row}\n") as served:
        meet(browser, served, 340)
        ask(browser, "Go")
        table = "document.querySelector('.body table')"
        assert browser.run(f"{table}.scrollWidth") > 400 > browser.run("document.documentElement.scrollWidth")
        assert browser.run(f"{table}.clientHeight") < 120


def test_on_a_wide_screen_the_key_of_the_list_moves_the_focus_to_it(browser: Browser, loaded: LoadedModel) -> None:
    with serving(loaded, ScriptedEngine(lambda request: [90] * 5)) as served:
        meet(browser, served)
        ask(browser, "One")
        browser.press("l", 76, code="KeyL", modifiers=1)
        assert browser.run("document.activeElement.className") == "title"
        assert not browser.run("document.body.matches('.listing')")


SLOW_LIST = """
const asked = window.fetch, gate = new Promise((open) => { window.openGate = open; });
window.fetch = async (path, ...rest) => {
  if (path === "v1/models" && rest[0].headers.authorization === HELD) await gate;
  return asked(path, ...rest);
};
"""


@pytest.mark.parametrize("key", [None, "the-key"])
def test_what_is_sent_before_the_models_are_listed_waits_for_them(
    key: str | None, browser: Browser, scripted: Scripted
) -> None:
    held, settings = "undefined", ServerSettings(("pico",))
    if key is not None:  # without which the list is refused
        held, settings = json.dumps(f"Bearer {key}"), replace(settings, key=key.encode())
    with scripted("Hi", settings=settings) as served, browser.before_load(SLOW_LIST.replace("HELD", held)):
        browser.open(f"{served.url}/health")
        browser.run("localStorage.clear(); sessionStorage.clear()")
        browser.open(f"{served.url}/")
        if key is not None:
            browser.wait("document.getElementById('settings').open")
            fill(browser, "#key", key)
        ask(browser, "One", 0)
        browser.press("Enter", 13, "\r")
        assert not shown(browser, ".turn") and browser.run("document.getElementById('prompt').value") == "One"
        browser.run("openGate()")
        replied(browser)
        assert shown(browser, ".user .text") == ["One"] and not browser.run("document.getElementById('prompt').value")
