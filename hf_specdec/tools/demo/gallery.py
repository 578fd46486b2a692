"""Prompts that show where speculation shines, and where it does not: for the embedded models, and for chat models."""

import json
from pathlib import Path

EXAMPLES = json.loads((Path(__file__).parent / "assets" / "gallery.json").read_text("utf-8"))
GALLERY, CHAT_GALLERY = EXAMPLES["code"], EXAMPLES["chat"]  # each with name, prompt, and what it shows
