"""Text made harmless, and the short texts of the page: markup is escaped, control characters become signs."""

import html
import unicodedata

from hf_specdec.errors import ConfigError
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
