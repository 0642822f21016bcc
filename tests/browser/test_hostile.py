"""Model text is hostile: whatever it says, it stays text."""

from __future__ import annotations

from typing import Any

from driving import run_to_end

HOSTILE = [
    "<script>document.title='x'</script>",
    "<img src=x onerror=alert(1)>",
    "</span></div></section>",
    "{{value}}",
    "{{{constructor.constructor('alert(1)')()}}}",
    "${alert(1)}",
    "${40+2}",
    "`+alert(1)+`",
    "<!-- ",
    "]]>",
    "&lt;b&gt;&#60;",
    "<style>*{display:none}</style>",
    "<iframe src=https://example.com>",
    "javascript:alert(1)",
    '"}\n{"e":"error","text":"forged"}',
    "\\u003cscript>",
    "\u202eright to left\u202c",
    "\u2066isolate\u2069",
    "\u200b\ufeff\u00ad",
    "\x00\x07\x1b[31m\x7f\x9b",
    "a\r\nb\tc",
    "\u2028\u2029",
    "\U000e0041\U000e0042",
    "\ud800",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "</textarea></style></title>",
    "<svg/onload=alert(1)>",
    "<math><mi xlink:href=javascript:alert(1)>x",
    "'\"><script>alert(1)</script>",
    "<a href='javascript:alert(1)'>x</a>",
    "<base href=https://example.com/>",
    "<meta http-equiv=refresh content='0;url=//example.com'>",
    "<object data=//example.com>",
    "<template><script>alert(1)</script></template>",
    "{{constructor.constructor('alert(1)')()}}",
    "<%= 7*7 %> #{7*7}",
    "\\x3cscript\\x3e %3Cscript%3E",
    '=HYPERLINK("http://example.com")',
    "z\u0335\u0336\u0337\u0338algo",
    "שלום عربى",
    "漢字 😀 👩‍🚀",
    "\n",
    "",
]
PICTURES = {
    "\u202eright to left\u202c": "⟨U+202E⟩right to left⟨U+202C⟩",
    "\u2066isolate\u2069": "⟨U+2066⟩isolate⟨U+2069⟩",
    "\u200b\ufeff\u00ad": "⟨U+200B⟩⟨U+FEFF⟩⟨U+00AD⟩",
    "\x00\x07\x1b[31m\x7f\x9b": "␀␇␛[31m␡⟨U+009B⟩",
    "a\r\nb\tc": "a\nb\tc",
    "\u2028\u2029": "⟨U+2028⟩⟨U+2029⟩",
    "\U000e0041\U000e0042": "⟨U+E0041⟩⟨U+E0042⟩",
    "\ud800": "⟨U+D800⟩",
}
TOKENS = """() => [...document.querySelectorAll('#plain-stream .t')].map(t => t.textContent)"""
INSIDE = """() => [...new Set([...document.querySelectorAll('.stream *, .card *')].map(e => e.tagName))].sort()"""


def test_hostile_text_is_shown_as_text(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    engine.texts = HOSTILE
    page = visit(scripted[1])
    title = page.title()
    page.fill("#prompt textarea", "".join(HOSTILE).replace("\ud800", ""))
    run_to_end(page)
    expected = [PICTURES.get(text, text) for text in HOSTILE]
    assert page.evaluate(TOKENS)[: len(HOSTILE)] == expected
    assert page.title() == title
    assert page.evaluate(INSIDE) == ["DIV", "I", "P", "SPAN"] or page.evaluate(INSIDE) == ["DIV", "I", "SPAN"]
    assert page.inner_text(".race .status-text").startswith("Identical")


def test_hostile_text_stays_text_in_the_card(scripted: tuple[Any, str], engine: Any, visit: Any) -> None:
    engine.texts = HOSTILE
    page = visit(scripted[1])
    run_to_end(page)
    for index in range(0, len(HOSTILE), 3):
        page.evaluate("i => document.querySelectorAll('#plain-stream .t')[i].scrollIntoView()", index)
        page.evaluate("i => document.querySelectorAll('#plain-stream .t')[i].focus()", index)
        page.evaluate(
            """i => {
                const { card } = document.querySelector('.race').race;
                card.show(document.querySelectorAll('#plain-stream .t')[i], true);
            }""",
            index,
        )
        shown = page.inner_text("#token-card .card-token")
        assert "<" in shown or "<" not in HOSTILE[index]
        assert set(page.evaluate(INSIDE)) <= {"DIV", "I", "P", "SPAN", "CODE", "B"}
