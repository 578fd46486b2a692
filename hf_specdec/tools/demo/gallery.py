"""Prompts that show where speculation shines, and where it does not: for the embedded models, and for chat models."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt of the gallery: its name, what it shows, and its text."""

    name: str
    shows: str
    prompt: str


_examples = json.loads((Path(__file__).parent / "assets" / "gallery.json").read_text("utf-8"))
GALLERY, CHAT_GALLERY = (tuple(Example(**example) for example in _examples[kind]) for kind in ("code", "chat"))
