"""Hostile replies in the browser: nothing that a model writes runs, loads or links to code, or stalls the page."""

import json
import time
from collections.abc import Iterator

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.utils.dtypes import FLOATS
from tests.support.browser import CHROMIUM, Browser
from tests.support.paths import PICO
from tests.support.served import ScriptedEngine, Served, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
RUN = "window.hacked=1"
HOSTILE = (
    f'<img src=x onerror="{RUN}"><script>{RUN}</script>',
    f"[a](javascript:{RUN}) [b](JaVaScRiPt:{RUN}) [c](data:text/html,<script>{RUN}</script>) [d](vbscript:x)",
    f"[e](&#106;avascript:{RUN}) [f](java&Tab;script:{RUN}) [g](\\x01javascript:{RUN}) [h](//evil.example/x)",
    f'[i]: javascript:{RUN}\n\n[i] <javascript:{RUN}> [j](https://a.example/" onclick="{RUN})',
    f'![k](javascript:{RUN}) ![l](https://evil.example/x.png) ![m](x" onerror="{RUN})',
    f"<svg onload={RUN}><svg/onload={RUN}>",
    f'<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror={RUN}&gt;">',
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>\n\n<object data=javascript:{RUN}>",
    f"<form action=javascript:{RUN}><button>x</button></form><base href=//evil.example/>",
    "<link rel=stylesheet href=//evil.example/>",
    f"<a href=javascript:{RUN} id=prompt>x</a><style>*{{display:none}}</style><p style='position:fixed'>",
    f"```<script>{RUN}</script>\n<svg onload={RUN}>\n```\n\n```html\n<script>{RUN}</script><b onclick={RUN}>\n```",
    f'```x" onclick="{RUN}\n1\n```\n\n`<img src=x onerror={RUN}>`',
    f"$\\href{{javascript:{RUN}}}{{x}}$ $\\url{{javascript:{RUN}}}$ $\\includegraphics{{https://evil.example/x}}$",
    f"$\\htmlData{{x=y}}{{z}} \\htmlId{{prompt}}{{z}} \\htmlStyle{{position:fixed}}{{z}}$ $<img src=x onerror={RUN}>$",
    f"$$</span><script>{RUN}</script>$$\n\n\\[<svg onload={RUN}>\\]",
    f"|<i onclick={RUN}>a</i>|b|\n|-|-|\n|<u>1</u>|[n](javascript:{RUN})|",
    f"# <h1 onclick={RUN}>\n\n- <a href=javascript:{RUN}>x</a>\n\n> <iframe src=javascript:{RUN}>",
    f'<span class="formula">\\href{{javascript:{RUN}}}{{x}}</span>',
)
SLOW = {
    "brackets": "[" * 20_000,
    "quotes": "> " * 5_000,
    "strong": "**a " * 5_000,
    "emphasis": "*a_" * 3_000,
    "ticks": "`a" * 10_000,
    "dollars": "$$" * 10_000,
    "formulas": "$x" * 10_000,
    "backslashes": "\\(" * 10_000,
    "macros": "$\\def\\a{\\a\\a}\\a$ $$" + "{" * 3_000 + "$$",
    "tags": "<a " * 7_000,
    "cells": "|a" * 3_000 + "\n" + "|-" * 3_000,
    "mixed": "word **bold** `code` [l](https://a.b) $x^2$ \n" * 500,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder = open_model_folder(PICO)
    loaded = LoadedModel.load(folder, EngineConfig(device="cpu", dtype=FLOATS["fp32"]).place(folder.config))
    reply = loaded.tokenizer.encode("\n\n".join(HOSTILE), add_special=False)
    with serving(loaded, ScriptedEngine(lambda request: reply, context=1 << 15)) as found:
        yield found


def test_what_a_model_writes_never_runs(browser: Browser, served: Served) -> None:
    browser.open(f"{served.url}/")
    browser.wait("document.title.startsWith('pico')")
    browser.requested.clear()
    browser.errors.clear()
    browser.run("document.getElementById('prompt').focus()")
    browser.type("<img src=x onerror=window.hacked=1>")
    browser.press("Enter", 13, "\r")
    browser.wait("document.querySelector('.assistant') && !document.body.matches('.generating')")
    check(browser, "document.querySelector('.assistant .body')")
    assert RUN in browser.run("document.querySelector('.assistant .body').textContent")
    assert not browser.run("document.querySelector('.user img')")
    browser.run("document.querySelector('#conversations .title').click()")  # as read back from the storage
    check(browser, "document.querySelector('.assistant .body')")
    own = {f"{served.url}{path}" for path in ("/v1/chat/completions", "/health", "/v1/models")}
    assert {one for one in browser.requested if "/web/" not in one} <= own
    assert not [error for error in browser.errors if '"source": "network"' not in error]


def show(browser: Browser, text: str) -> None:
    """Show a reply in a node of its own, whose id is `attacked`."""
    browser.run(
        "import('/web/markdown.js').then(({MarkdownView}) => { document.getElementById('attacked')?.remove();"
        "const node = document.createElement('div'); node.id = 'attacked';"
        "document.getElementById('talk').append(node);"
        f"new MarkdownView(node).update({json.dumps(text)}); }})"
    )


def test_each_attack_alone(browser: Browser, served: Served) -> None:
    """Alone, because one unfinished construct can hide the next one."""
    browser.open(f"{served.url}/")
    browser.wait("document.title.startsWith('pico')")
    for text in HOSTILE:
        show(browser, text)
        check(browser, "document.getElementById('attacked')")


def check(browser: Browser, node: str) -> None:
    """Only nodes and attributes of Markdown, code and formulas; links lead to pages or mail."""
    assert browser.run("window.hacked") is None
    tags = set(browser.run(f"[...{node}.querySelectorAll('*')].map((node) => node.localName)"))
    assert not tags & {
        "img",
        "script",
        "iframe",
        "object",
        "form",
        "base",
        "link",
        "style",
        "input",
        "u",
        "i",
        "b",
        "image",
    }
    addresses = browser.run(f"[...{node}.querySelectorAll('[href]')].map((node) => node.getAttribute('href'))")
    assert all(one.startswith(("https://", "http://", "mailto:")) for one in addresses), addresses
    names = browser.run(
        f"[...{node}.querySelectorAll('*')].filter((node) => !node.closest('.katex'))"
        ".flatMap((node) => [...node.attributes].map((attribute) => attribute.name))"
    )
    assert set(names) <= {"href", "target", "rel", "type", "start", "class", "align", "tabindex", "aria-label", "title"}
    every = browser.run(f"[...{node}.querySelectorAll('*')].flatMap((node) => [...node.attributes].map((a) => a.name))")
    assert not [name for name in every if name.startswith(("on", "data-", "id"))]
    assert browser.run("document.querySelectorAll('#prompt').length") == 1


@pytest.mark.slow
def test_no_text_stalls_the_page(browser: Browser, served: Served) -> None:
    browser.open(f"{served.url}/")
    browser.wait("document.title.startsWith('pico')")
    for name, text in SLOW.items():
        began = time.monotonic()
        show(browser, text)
        assert browser.run("document.getElementById('attacked').textContent.trim().length > 0"), name
        assert time.monotonic() - began < 20, name  # a hang, not a speed
