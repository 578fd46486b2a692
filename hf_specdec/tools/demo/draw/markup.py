"""Text made harmless: markup is escaped, and control characters become visible signs that do nothing.

escaped("<b>\x1b[2J")      # "&lt;b&gt;␛[2J"
one_line("a\tb\n")         # "a⇥b⏎"
"""

import html
import unicodedata

PICTURES = 0x2400  # of the control characters below U+0020
DELETE, DELETE_PICTURE = 0x7F, "\u2421"
MAX_LABEL = 14


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(PICTURES + code)
    if code == DELETE:
        return DELETE_PICTURE
    if unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp"):  # also those that turn text around
        return f"\\u{code:04x}"
    return character


def escaped(text: str) -> str:
    """HTML that shows `text`; line breaks and tabs stay, other control characters are shown by a sign."""
    return html.escape("".join([c if c in "\n\t" else _visible(c) for c in text.replace("\r\n", "\n")]), quote=True)


def one_line(text: str, longest: int = MAX_LABEL) -> str:
    """HTML that shows `text` in one line, spaces and line breaks as signs, at most `longest` characters."""
    signs = {"\n": "\u23ce", "\t": "\u21e5", " ": "\u00b7"}
    shown = "".join([signs.get(c) or _visible(c) for c in text]) or "\u2205"
    if len(shown) > longest:
        shown = shown[: longest - 1] + "\u2026"
    return html.escape(shown, quote=True)


def percent(probability: float) -> str:
    """A probability in as few digits as say something."""
    if probability >= 0.995:
        return "100 %" if probability >= 0.9995 else f"{probability:.1%}".replace("%", " %")
    return "<1 %".replace("<", "&lt;") if probability < 0.01 else f"{probability:.0%}".replace("%", " %")
