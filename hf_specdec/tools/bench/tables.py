"""Tables and lines of text of a document, and the document as markdown. Knows nothing about terminals."""

import os
from collections.abc import Mapping
from typing import Any

from hf_specdec.errors import ConfigError, counted
from hf_specdec.tools.bench.document import FORMAT, RULE, SPEEDS, Document, load_document
from hf_specdec.tools.bench.speed_tables import speed_tables
from hf_specdec.tools.bench.speeds import speed_notes, summarize_again
from hf_specdec.tools.bench.table import Table


def read_document(path: str | os.PathLike[str], field: str = "file") -> Document:
    """Read a document from a file of JSON, or of JSON lines where its name ends in `.jsonl`.

    Raises:
        ConfigError: names `field`, and what is wrong: there is no file, it is something else, or the tables cannot be
            made of it.
    """
    document = load_document(path, field)
    if document.get("format") != FORMAT:
        raise ConfigError(field, f"{RULE} in format {FORMAT}", document.get("format"), "Measure again.")
    try:
        if document["kind"] == SPEEDS:
            summarize_again(document)
        markdown(document)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(field, f"{RULE} that is whole", str(path), f"It is not: {what}. Measure again.") from error
    return document


def tables(document: Document) -> list[Table]:
    """Tables of a document that have rows."""
    if document["kind"] == SPEEDS:
        return speed_tables(document)
    return [Table.of(**table) for table in document["tables"] if table["rows"]]


def facts(document: Document) -> list[str]:
    """Lines above the tables: hardware, models, settings, versions."""
    header, settings, entries = document["header"], document["settings"], document["models"]
    hardware = header["hardware"]
    where = [hardware[name] for name in ("accelerator", "cpu") if name in hardware]
    threads = counted(header["threads"], "thread")
    machine = f"{', '.join(where)}, {counted(hardware['cores'], 'core')}; {header['device']}, {threads}"
    dtypes = {entry["dtype"] for entry in entries}
    lines = [f"{machine}, {dtypes.pop()}" if len(dtypes) == 1 else machine]
    lines += [line for entry in entries for line in _model_facts(entry, len(entries) > 1, bool(dtypes))]
    if document["kind"] == SPEEDS:
        prompts, most = len(document["prompts"]), counted(settings["max_new_tokens"], "new token")
        lines.append(f"{counted(prompts, 'prompt')}, at most {most}, rounds: {settings['rounds']}")
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return [*lines, f"{versions}; commit {header['commit'] or 'unknown'}; {header['date']}"]


def _model_facts(entry: Mapping[str, Any], with_label: bool, with_dtype: bool) -> list[str]:
    model = entry["model"]
    name = entry["name"] if with_label else model["name"]
    dtype = f", {entry['dtype']}" if with_dtype else ""
    size = f", {model['bytes'] / 1e6:.0f} MB" if "bytes" in model else ""
    lines = [f"{name} ({model['architecture']}, {model['parameters'] / 1e6:.1f}M parameters{size}{dtype})"]
    if entry.get("assistant"):
        lines[0] += f", drafts from {entry['assistant']}"
    if "widening" in model:
        wide = model["widening"]
        difference = f"largest difference of the logits {wide['largest_logit_difference']:.1e}"
        lines.append(f"widened to {wide['hidden_size']}x{wide['num_layers']}; {difference}")
    if "devices" in model:
        lines.append(f"weights on {', '.join(model['devices'])}")
    return lines


def notes(document: Document) -> list[str]:
    """Lines below the tables: meaning of the columns, and what is missing or wrong."""
    is_speeds = document["kind"] == SPEEDS
    lines = speed_notes(document) if is_speeds else list(document["notes"])
    if not document["is_complete"]:
        lines.append(f"Incomplete: the run was interrupted{'; --resume continues it' if is_speeds else ''}.")
    return lines


def markdown(document: Document) -> str:
    """The whole document as markdown."""
    parts = [*(f"{line}  " for line in facts(document)), ""]
    for table in tables(document):
        parts += [f"**{table.title}**", ""] if table.title else []
        parts += [table.markdown(), ""]
    parts += [f"- {line}" for line in notes(document)]
    return "\n".join(parts) + "\n"
