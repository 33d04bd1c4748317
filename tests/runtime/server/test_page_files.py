"""The files of the page: as their projects published them, licensed, small, and under a strict policy."""

import hashlib
import json
import re

from tests.support.paths import ROOT
from tests.support.served import Served

WEB = ROOT / "runtime" / "server" / "web"
VENDOR = WEB / "vendor"
OWN = [path for path in sorted(WEB.iterdir()) if path.is_file()]


def test_vendored_files_are_the_published_ones() -> None:
    """`packages.json` has the hash of every file, and there is no other file."""
    packages = json.loads((VENDOR / "packages.json").read_text())
    listed = {f"{folder}/{file}": digest for folder, one in packages.items() for file, digest in one["files"].items()}
    present = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    assert present == {*listed, "packages.json"}
    assert not [
        file for file, digest in listed.items() if hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() != digest
    ]
    for folder, package in packages.items():
        assert package["version"] and package["license"] and f"{folder}/LICENSE" in listed
    assert sum((VENDOR / file).stat().st_size for file in listed) < 1_000_000


def test_every_font_of_the_formulas_is_present() -> None:
    fonts = set(re.findall(r"url\((fonts/[\w-]+\.woff2)\)", (VENDOR / "katex" / "katex.min.css").read_text()))
    assert len(fonts) == 20 and all((VENDOR / "katex" / font).is_file() for font in fonts)


def test_the_page_is_served_under_a_strict_policy(served: Served) -> None:
    page = served.ask("GET", "/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
    text = page.body.decode()
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", text)
    for file in re.findall(r'(?:src|href)="(?!data:)([^"]+)"', text):
        answer = served.ask("GET", f"/{file}")
        assert answer.status == 200 and answer.headers["content-type"].startswith(("text/javascript", "text/css"))
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_own_scripts_write_no_markup_and_name_no_host() -> None:
    assert {path.suffix for path in OWN} == {".html", ".css", ".js"}
    for path in OWN:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|document\.write|new Function", text), (
            path
        )
        assert not re.search(r"https?://[a-z]", text), path


def test_a_file_is_sent_again_only_when_it_has_changed(served: Served) -> None:
    first = served.ask("GET", "/web/page.js")
    again = served.ask("GET", "/web/page.js", headers={"if-none-match": first.headers["etag"]})
    assert (first.status, again.status, again.body) == (200, 304, b"")


def test_only_files_of_the_page_are_served(served: Served) -> None:
    names = (
        "../guard.py", "..%2fguard.py", "%2e%2e/guard.py", "/etc/passwd", "vendor/packages.json", "vendor", "",
        "vendor/marked/LICENSE", "page.js/", "PAGE.JS", "page.js%00", "./page.js", "vendor//katex/katex.min.js",
    )  # fmt: skip
    for name in names:
        assert served.ask("GET", f"/web/{name}").status == 404, name
