"""The page in a real browser: every action of a conversation, a phone, the keyboard; nothing from elsewhere."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import Request
from mycli.runtime.server.http.settings import ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.browser import CHROMIUM, Browser
from tests.support.served import ScriptedEngine, Served, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
BODY = "[...document.querySelectorAll('.assistant .body')].at(-1)"
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_fails(browser: Browser) -> Iterator[None]:
    """No exception, no missing file of the page, and no broken rule of the policy."""
    browser.errors.clear()
    yield
    assert not [error for error in browser.errors if '"source": "network"' not in error or "/web/" in error]


def meet(browser: Browser, served: Served, width: int = 1200) -> None:
    browser.resize(width, 760)
    browser.open(f"{served.url}/health")
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.requested.clear()
    browser.open(f"{served.url}/")
    browser.wait("document.title.startsWith('pico')")


def click(browser: Browser, selector: str) -> None:
    browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).click()")


def fill(browser: Browser, selector: str, value: str) -> None:
    node = f"document.querySelector({json.dumps(selector)})"
    browser.run(f"{node}.value = {json.dumps(value)}; {node}.dispatchEvent(new Event('change'))")


def replied(browser: Browser, count: int = 1) -> None:
    browser.wait(f"!document.body.matches('.generating') && document.querySelectorAll('.assistant').length === {count}")


def ask(browser: Browser, text: str, count: int = 1) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter", 13, "\r")
    if count:
        replied(browser, count)


def shown(browser: Browser, selector: str) -> list[str]:
    found = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")
    return list(found)


def stored(browser: Browser) -> Any:
    return json.loads(browser.run("localStorage.getItem('mycli.conversations') ?? '[]'"))


def roles(browser: Browser) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in stored(browser)[0]["messages"]]


def test_a_conversation_streams_and_continues(browser: Browser, served: Served) -> None:
    meet(browser, served)
    assert browser.run("document.activeElement.id") == "prompt"
    fill(browser, "#temperature", "0")
    ask(browser, QUESTION)
    assert browser.run(f"{BODY}.textContent.trim()") == ANSWER
    (note,) = shown(browser, ".assistant .note")
    assert "tokens/s" in note and "first after" in note and "cached)" in note
    ask(browser, "What is 7 times 8?", 2)
    assert [role for role, _ in roles(browser)] == ["user", "assistant"] * 2
    assert int(shown(browser, ".assistant .note")[1].partition(" cached)")[0].rpartition("(")[2]) > 0
    browser.wait("/^cache \\d+ %$/.test(document.getElementById('state').textContent)")
    assert all(one.startswith((served.url + "/", "data:,")) for one in browser.requested)
    browser.press("n", 78, code="KeyN", modifiers=1)
    browser.wait("document.querySelectorAll('.turn').length === 0")


def test_conversations_are_listed_renamed_exported_and_deleted(
    browser: Browser, scripted: Scripted, tmp_path: Path
) -> None:
    browser.save_downloads(tmp_path)
    with scripted("Hi *there*") as served:
        meet(browser, served)
        ask(browser, "First question")
        click(browser, "#fresh")
        ask(browser, "Second question")
        browser.open(f"{served.url}/")  # a reload continues with the conversation of the tab
        browser.wait("document.querySelectorAll('.turn').length === 2")
        assert shown(browser, ".user .text") == ["Second question"]
        assert shown(browser, "#conversations .title") == ["Second question", "First question"]
        click(browser, "#conversations li:nth-child(2) .title")
        assert shown(browser, ".user .text") == ["First question"]
        click(browser, "[aria-label='Rename First question']")
        browser.type("My <b>name</b>")
        browser.press("Enter", 13, "\r")
        assert shown(browser, "#conversations .title") == ["Second question", "My <b>name</b>"]
        ask(browser, "More", 2)  # writes the conversation again, with its new name
        assert shown(browser, "#conversations .title") == ["My <b>name</b>", "Second question"]
        click(browser, "[aria-label^='Export My']")
        click(browser, "#export-all")
        saved, all_saved = tmp_path / "My-b-name-b.md", tmp_path / "mycli-conversations.json"
        end = time.monotonic() + 20
        while not (saved.exists() and all_saved.exists()) and time.monotonic() < end:
            browser.run("0")
            time.sleep(0.02)
        assert "## You\n\nFirst question\n" in saved.read_text() and "Hi *there*" in saved.read_text()
        assert [one["title"] for one in json.loads(all_saved.read_text())] == ["My <b>name</b>", ""]
        click(browser, "[aria-label^='Delete My']")
        assert len(stored(browser)) == 2  # it asks once more
        click(browser, "[aria-label^='Delete My']")
        assert shown(browser, "#conversations .title") == ["Second question"] and not shown(browser, ".turn")


def test_a_message_is_edited_and_a_reply_regenerated(browser: Browser, loaded: LoadedModel) -> None:
    replies = iter(["one", "two", "three", "four"])

    def script(request: Request) -> list[int]:
        return loaded.tokenizer.encode(next(replies), add_special=False)

    with serving(loaded, ScriptedEngine(script)) as served:
        meet(browser, served)
        ask(browser, "A")
        ask(browser, "B", 2)
        click(browser, ".again")
        browser.wait(f"{BODY}.textContent.trim() === 'three'")
        replied(browser, 2)
        assert roles(browser) == [("user", "A"), ("assistant", "one"), ("user", "B"), ("assistant", "three")]
        browser.press("ArrowUp", 38)
        assert browser.run("document.activeElement.ariaLabel") == "Edited message"
        browser.press("Escape", 27)
        browser.run("document.querySelector('.user .edit').click()")  # the first one
        browser.type("!")
        browser.press("Enter", 13, "\r")
        browser.wait(f"{BODY}.textContent.trim() === 'four'")
        replied(browser)
        assert roles(browser) == [("user", "A!"), ("assistant", "four")]
        served.service.draining = True  # a regeneration that fails changes nothing
        click(browser, ".again")
        browser.wait("!document.getElementById('problem').hidden")
        replied(browser)
        assert roles(browser) == [("user", "A!"), ("assistant", "four")] and shown(browser, ".body") == ["four\n"]


@pytest.mark.parametrize("how", ["button", "key"])
def test_a_reply_is_stopped(browser: Browser, loaded: LoadedModel, how: str) -> None:
    engine = ScriptedEngine(lambda request: [90] * 5000, pause=0.01)
    with serving(loaded, engine) as served:
        meet(browser, served)
        ask(browser, "Go", 0)
        browser.wait(f"{BODY} && {BODY}.textContent.length > 5")
        if how == "key":
            browser.press("Escape", 27)
        else:
            click(browser, "#stop")
        replied(browser)
        assert "stopped" in shown(browser, ".assistant .note")[0]
        served.idle()
        assert engine.cancelled == [1] and browser.run("!document.getElementById('send').hidden")
        assert len(roles(browser)[1][1]) >= 5


def test_a_conversation_that_is_deleted_while_it_streams_stays_deleted(browser: Browser, loaded: LoadedModel) -> None:
    with serving(loaded, ScriptedEngine(lambda request: [90] * 5000, pause=0.01)) as served:
        meet(browser, served)
        ask(browser, "Go", 0)
        browser.wait(f"{BODY} && {BODY}.textContent.length > 5")
        click(browser, "#stop")
        replied(browser)
        click(browser, ".again")
        browser.wait("document.body.matches('.generating')")
        click(browser, "[aria-label^='Delete']")
        click(browser, "[aria-label^='Delete']")
        browser.wait("!document.body.matches('.generating')")
        assert stored(browser) == []


def test_markup_is_shown(browser: Browser, scripted: Scripted) -> None:
    text = (
        "# T\n\n**b** *i* `c` ~~d~~ [l](https://a.example/) ![p](https://b.example/x.png)\n\n- x\n- y\n  - z\n\n"
        "3. p\n\n> q\n\n"
        "```python\ndef f(): return 'a' < b\n```\n\n```nonsense\na < b\n```\n\n|h|n|c|\n|-|-:|:-:|\n|v|1|2|\n\n"
        "Costs $5 and $6. Inline $x^2$ and \\(y\\).\n\n$$\n\\frac{a}{b}\n= c\n$$\n\n\\[ z \\]\n\n$\\unknown{$\n"
    )
    with scripted(text) as served:
        meet(browser, served)
        ask(browser, "Go")
        present = {
            **dict.fromkeys(
                ("h1", "strong", "em", "del", "p code", "ul ul li", "ol[start='3'] li", "blockquote p", "th", "td"), 1
            ),
            "td[align=right] + td[align=center]": 1,
            "a[href='https://a.example/'][rel~=noopener][target=_blank]": 1,
            "a[href='https://b.example/x.png']": 1,
            ".code .hljs-keyword, .code .hljs-string": 3,
            ".katex": 4,
            ".katex-display": 2,
            "math mfrac": 1,
        }
        for css, count in present.items():
            assert browser.run(f"{BODY}.querySelectorAll({json.dumps(css)}).length") >= count, css
        assert shown(browser, ".body pre code") == ["def f(): return 'a' < b", "a < b"]
        assert shown(browser, ".code span:first-child")[0] == "python"
        assert "Costs $5 and $6." in browser.run(f"{BODY}.textContent")
        assert browser.run(f"{BODY}.querySelectorAll('.katex').length") == 4
        browser.wait("document.fonts.check('16px KaTeX_Main')")


def test_blocks_that_do_not_change_stay_while_a_reply_grows(browser: Browser, served: Served) -> None:
    meet(browser, served)
    script = (
        "import('/web/markdown.js').then(({MarkdownView}) => { const node = document.createElement('div');"
        "const view = new MarkdownView(node); view.update('# a\\n\\nb'); const first = node.querySelector('h1');"
        "view.update('# a\\n\\nb c\\n\\n- d');"
        "return [first === node.querySelector('h1'), node.querySelectorAll('*').length, node.textContent.trim()]; })"
    )
    same, count, text = browser.run(script)
    assert same and count == 4 and text.split() == ["a", "b", "c", "d"]


def test_reasoning_is_folded_with_its_time(browser: Browser, scripted: Scripted) -> None:
    with scripted("<think>\nhidden thought\n</think>\n\nThe answer.") as served:
        meet(browser, served)
        ask(browser, "Go")
        for _ in range(2):
            assert browser.run(f"{BODY}.textContent.trim()") == "The answer."
            assert browser.run("document.querySelector('.thought').open") is False
            assert shown(browser, ".thought summary")[0].startswith("Thought 0.")
            assert shown(browser, ".thought div")[0].strip() == "hidden thought"
            browser.open(f"{served.url}/")  # and after a reload
            browser.wait("document.querySelectorAll('.turn').length === 2")


def test_text_files_are_attached(browser: Browser, loaded: LoadedModel, tmp_path: Path) -> None:
    prompts: list[str] = []

    def script(request: Request) -> list[int]:
        prompts.append(loaded.tokenizer.decode(request.prompt))
        return [90]

    for name, content in {"a.md": b"first ``` line", "b.txt": "zweite Zeile é".encode(), "c.png": b"\x89PNG\0"}.items():
        (tmp_path / name).write_bytes(content)
    with serving(loaded, ScriptedEngine(script)) as served:
        meet(browser, served)
        browser.choose("#files", [tmp_path / "a.md", tmp_path / "b.txt", tmp_path / "c.png"])
        browser.wait("document.querySelectorAll('#attached li').length === 2")
        assert "c.png is not a text file" in shown(browser, "#problem span")[0]
        click(browser, "[aria-label='Remove b.txt']")
        ask(browser, "Read it")
        assert "a.md:\n````\nfirst ``` line\n````\n\nRead it" in prompts[0] and "zweite" not in prompts[0]
        assert browser.run("document.getElementById('attached').hidden")
        assert shown(browser, ".bubble summary") == ["a.md · 14 B"]
        ask(browser, "Again", 2)
        assert "first ``` line" in prompts[1]  # it stays part of the conversation


def test_a_model_is_chosen_and_remembered(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi", settings=ServerSettings(("pico", "other"))) as served:
        meet(browser, served)
        assert shown(browser, "#model option") == ["pico", "other"]
        fill(browser, "#model", "other")
        ask(browser, "Go")
        assert stored(browser)[0]["messages"][1]["model"] == "other"
        browser.open(f"{served.url}/")
        browser.wait("document.title.startsWith('other')")


def test_settings_are_sent_and_remembered(browser: Browser, loaded: LoadedModel) -> None:
    seen: list[Request] = []

    def script(request: Request) -> list[int]:
        seen.append(request)
        return [90]

    with serving(loaded, ScriptedEngine(script)) as served:
        meet(browser, served)
        values = {"temperature": "0.5", "top_p": "0.7", "top_k": "9", "max_tokens": "33", "seed": "4"}
        for name, value in {**values, "system": "Brief.", "theme": "dark"}.items():
            fill(browser, f"#{name}", value)
        for count in (1, 2):
            ask(browser, "Go", count)
            request = seen[-1]
            drawn = request.sampling
            assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (0.5, 0.7, 9, 4)
            assert request.limit == 33 and "Brief." in loaded.tokenizer.decode(request.prompt)
            assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"
            browser.open(f"{served.url}/")
            browser.wait("document.title.startsWith('pico') && document.querySelectorAll('.turn').length > 1")


def test_a_refusal_is_shown_and_the_question_given_back(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi") as served:
        meet(browser, served)
        served.service.draining = True
        ask(browser, "My question", 0)
        browser.wait("document.querySelector('#problem').textContent.includes('shutting down')")
        browser.wait("document.getElementById('prompt').value === 'My question'")
        assert stored(browser) == [] and not shown(browser, ".turn")
        top = "document.getElementById('{}').getBoundingClientRect()"
        assert browser.run(f"{top.format('problem')}.bottom <= {top.format('prompt')}.top")
        click(browser, "#problem button")
        assert browser.run("document.getElementById('problem').hidden")


def test_a_key_is_asked_for(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi", settings=ServerSettings(("pico",), key=b"the-key")) as served:
        browser.open(f"{served.url}/health")
        browser.run("localStorage.clear(); sessionStorage.clear()")
        browser.open(f"{served.url}/")
        browser.wait("document.getElementById('settings').open && !document.getElementById('keyed').hidden")
        fill(browser, "#key", "the-key")
        browser.wait("document.title.startsWith('pico')")
        ask(browser, "Go")
        assert browser.run(f"{BODY}.textContent.trim()") == "Hi"
        assert "the-key" not in browser.run("JSON.stringify(localStorage)")


def test_storage_that_something_else_wrote_is_ignored(browser: Browser, scripted: Scripted) -> None:
    with scripted("Hi") as served:
        for content in ("{", '[null, {"id": 1}, {"id": "a", "messages": [{"role": "x"}]}, {"id": "a", "messages": 3}]'):
            meet(browser, served)
            browser.run(f"localStorage.setItem('mycli.conversations', {json.dumps(content)})")
            browser.run("localStorage.setItem('mycli.settings', '[')")
            browser.open(f"{served.url}/")
            browser.wait("document.title.startsWith('pico')")
            ask(browser, "Go")
            assert len(stored(browser)) == 1


@pytest.mark.slow
def test_of_a_long_conversation_the_talk_scrolls_and_not_the_page(browser: Browser, scripted: Scripted) -> None:
    with scripted("word " * 2000, context=1 << 15) as served:
        meet(browser, served)
        for turn in (1, 2):
            ask(browser, "Go", turn)
        assert browser.run(f"{BODY}.textContent.length") > 9_990
        assert browser.run("document.documentElement.scrollHeight") <= 760
        talk = "document.getElementById('talk')"
        assert browser.run(f"{talk}.scrollHeight - {talk}.scrollTop - {talk}.clientHeight") < 80  # its end is seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_everything_is_within_reach(browser: Browser, scripted: Scripted, scheme: str) -> None:
    with scripted("```\n" + "x" * 500 + "\n```\n" + "y" * 500 + "\n\n$$" + "x+" * 80 + "x$$\n") as served:
        meet(browser, served, 340)
        browser.resize(340, 640, scheme)
        ask(browser, "Go")
        assert browser.run("document.documentElement.scrollWidth") <= 340
        box = "document.getElementById('{}').getBoundingClientRect()"
        for name in ("prompt", "send", "fresh", "attach", "open-side"):
            assert browser.run(f"{box.format(name)}.right") <= 340 and browser.run(f"{box.format(name)}.bottom") <= 640
            assert browser.run(f"{box.format(name)}.height") >= 40
        assert browser.run("getComputedStyle(document.getElementById('side')).visibility") == "hidden"
        browser.press("l", 76, code="KeyL", modifiers=1)
        assert browser.run("document.activeElement.id") == "close-side" and shown(browser, "#conversations .title")
        browser.press("Escape", 27)
        assert browser.run("getComputedStyle(document.getElementById('side')).visibility") == "hidden"
        click(browser, "#settings summary")
        assert browser.run("document.documentElement.scrollWidth") <= 340
        assert browser.run(f"{box.format('send')}.bottom") <= 640


def test_every_control_has_a_name(browser: Browser, scripted: Scripted) -> None:
    """For screen readers: a text, a label or an aria-label, which is more than a sign."""
    with scripted("```py\nx\n```") as served:
        meet(browser, served)
        ask(browser, "Go")
        names = browser.run(
            "[...document.querySelectorAll('button, input:not([hidden]), select, textarea')].map((node) =>"
            "node.ariaLabel || node.labels?.[0]?.textContent.trim() || node.textContent.trim())"
        )
        assert len(names) > 20 and all(len(name) > 1 and name.isprintable() or "\n" in name for name in names), names
        assert browser.run("document.getElementById('talk').getAttribute('aria-live')") == "polite"
        assert browser.run("document.getElementById('talk').getAttribute('aria-busy')") == "false"
