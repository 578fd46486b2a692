"""Text made harmless, the page's short texts, and the signs of the places that drafted tokens come from.

Markup is escaped, control characters become signs. Colours and lines are in the style sheet.
"""

import html
import unicodedata
from collections.abc import Iterable

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.entry import Source
from hf_specdec.methods.registry import sources
from hf_specdec.tools.demo.settings import LABELS, Settings

SIGNS = {"\n": "\u23ce", "\t": "\u21e5", " ": "\u00b7"}
CONTROLS = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")  # categories, those that turn text around among them


def _visible(character: str) -> str:
    return "\ufffd" if unicodedata.category(character) in CONTROLS else character


def escaped(text: str) -> str:
    """HTML that shows `text`; line breaks and tabs stay."""
    return html.escape("".join([c if c in "\n\t" else _visible(c) for c in text.replace("\r\n", "\n")]))


def one_line(text: str, longest: int = 14) -> str:
    """HTML that shows `text` in one line, spaces and line breaks as signs, at most `longest` characters."""
    shown = "".join([SIGNS.get(c) or _visible(c) for c in text]) or "\u2205"
    return html.escape(shown if len(shown) <= longest else shown[: longest - 1] + "\u2026")


def draw_notice(text: str) -> str:
    """A line of status, which screen readers read out."""
    return f'<div class="hs hs-status" role="status">{escaped(text)}</div>'


def draw_error(error: Exception) -> str:
    """An error and its remedy, with the labels of the page, without a traceback."""
    text = str(error)
    if isinstance(error, ConfigError) and error.field in LABELS:
        text = text.replace(f"`{error.field}`", f"\u201c{LABELS[error.field]}\u201d", 1)
    return f'<div class="hs hs-error" role="alert"><strong>Not possible:</strong> {escaped(text)}</div>'


def draw_link(settings: Settings) -> str:
    """A link that opens the page with these settings."""
    return f'<div class="hs"><a href="?{escaped(settings.to_query())}">Link to these settings</a></div>'


TARGET = Source("target", "the target's own", "chosen by the model itself, not drafted", "", "target")
DRAFTED = Source("draft", "drafted", "drafted", "", "draft")  # where a drafter does not say from where


def source_of(key: str) -> Source:
    """The source that a drafted node names."""
    return {TARGET.key: TARGET, **sources()}.get(key, DRAFTED)


def source_class(key: str) -> str:
    """The class that gives a source its colour and its line."""
    return f"hs-s-{source_of(key).style}"


def draw_legend(keys: Iterable[str]) -> str:
    """The meaning of the colours and lines of these sources, in a fixed order."""
    wanted = {source_of(key) for key in keys}
    items = [
        f'<li><span class="hs-t hs-s-{source.style}">{source.label}</span> <small>{source.meaning}</small></li>'
        for source in (TARGET, *sources().values(), DRAFTED)
        if source in {TARGET, *wanted}
    ]
    return f'<ul class="hs-legend" aria-label="Where tokens come from">{"".join(items)}</ul>'
