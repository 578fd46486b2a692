"""The words around a document's tables and figures: titles, the lines above, the lines below."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hf_specdec.errors import counted
from hf_specdec.tools.bench.document import (
    COST,
    DRAFTING,
    EXACT_DTYPES,
    GPU,
    MANY,
    PRECISIONS,
    REPLAY,
    SPEEDS,
    STEPS,
    flagged,
)
from hf_specdec.tools.bench.rows import REFERENCE

NOT_EQUAL = "NOT EQUAL"
MODE_TITLES = {"greedy": "greedy", "sampled": "sampled, temperature {temperature}, seed {seed}"}

Document = dict[str, Any]


class Panel(NamedTuple):
    """One model in one mode: what a table or a part of a figure shows."""

    title: str
    model: str
    mode: str
    rows: dict[str, Any]


def has_several(document: Document) -> bool:
    """Whether titles must name the model."""
    return len(document["models"]) > 1


def mode_titles(document: Document) -> dict[str, str]:
    """A title for each mode of a document of speeds."""
    modes = dict.fromkeys(mode for entry in document["models"] for mode in entry["summary"])
    return {mode: MODE_TITLES[mode].format(**document["settings"]) for mode in modes}


def panels(document: Document) -> list[Panel]:
    """The models of a document of speeds, each in its modes."""
    modes, several = mode_titles(document), has_several(document)
    return [
        Panel(f"{entry['name']}: {modes[mode]}" if several else modes[mode], entry["name"], mode, rows)
        for entry in document["models"]
        for mode, rows in entry["summary"].items()
    ]


def facts(document: Document) -> list[str]:
    """The lines above the tables: hardware, models, versions, settings."""
    header = document["header"]
    hardware = header["hardware"]
    where = [hardware[name] for name in ("accelerator", "cpu") if name in hardware]
    threads = counted(header["threads"], "thread")
    machine = f"{', '.join(where)}, {counted(hardware['cores'], 'core')}; {header['device']}, {threads}"
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    entries = document.get("models", [])
    dtypes = {entry["dtype"] for entry in entries}
    lines = [f"{machine}, {dtypes.pop()}" if len(dtypes) == 1 else machine]
    lines += [line for entry in entries for line in _model_facts(entry, len(entries) > 1, bool(dtypes))]
    if document["kind"] == SPEEDS:
        settings = document["settings"]
        prompts, most = len(document["prompts"]), counted(settings["max_new_tokens"], "new token")
        lines.append(f"{counted(prompts, 'prompt')}, at most {most}, rounds: {settings['rounds']}")
    else:
        names, settings = {"num_records": "recorded answer", "num_prompts": "prompt"}, document["settings"]
        lines += [counted(settings[name], noun) for name, noun in names.items() if name in settings]
    return [*lines, f"{versions}; commit {header['commit'] or 'unknown'}; {header['date']}"]


def notes(document: Document) -> list[str]:
    """The lines below the tables: what the columns say, what is missing, what is wrong."""
    lines = _NOTES[document["kind"]](document)
    if not document["is_complete"]:
        more = "; --resume continues it" if document["kind"] == SPEEDS else ""
        lines.append(f"Incomplete: the run was interrupted{more}.")
    return lines


def _replay_notes(document: Document) -> list[str]:
    lines = ["Tokens a step: 1 + accepted drafts, on recorded answers."]
    blind = [name for name, points in document["drafters"].items() if any(p.get("needs_logits") for p in points)]
    return lines + [f"{name} learns from logits too, which a recording does not have." for name in blind]


def _precisions_notes(document: Document) -> list[str]:
    lines = [
        "A step: one forward of 1 and of 8 tokens; all precisions take turns. Logits and KL: largest and mean distance "
        "from fp32's. Equal: texts with the tokens of plain generate at the same precision."
    ]
    return lines + [f"{row['precision']}: {row['error']}" for row in document["rows"] if "error" in row]


def _speeds_notes(document: Document) -> list[str]:
    several = has_several(document)
    lines = [
        f"Tasks and overall: tokens a second over those of {REFERENCE!r} beside it, median over prompts; 95 %: "
        f"bootstrap interval of overall. Equal: share of prompts with the tokens of {REFERENCE!r}.",
        "By CPU time: the same as overall, from the processor time of the process; the two agree on a quiet machine. "
        "Tokens a step: mean acceptance length, from the target's forwards after the prompt's. First token: median. "
        f"Peak memory: {document['models'][0]['peak_memory']}{', all models loaded' if several else ''}.",
    ]
    lines += [
        f"In {dtype} a forward of several tokens, and on CPUs this package's kernels, round differently from plain "
        f"{REFERENCE!r}, so the other of two nearly equal tokens may be chosen, and the text differs from there on. In "
        "fp32 the texts are equal."
        for dtype in sorted({entry["dtype"] for entry in document["models"]}.difference(EXACT_DTYPES))
    ]
    for entry in document["models"]:
        of = f" of {entry['name']}" if several else ""
        lines += [f"Left out{of}: {name}: {reason}" for name, reason in entry["left_out"].items()]
    for panel in panels(document):
        where = _where(document, panel.model, panel.mode)
        for name, row in panel.rows.items():
            lines += [f"{name} ({where}) decoded without drafts: {reason}" for reason in row["plain_reasons"]]
    lines += [
        f"{NOT_EQUAL}: {flag.row} ({_where(document, flag.model, flag.mode)}) gave the tokens of {REFERENCE!r} on "
        f"{flag.share_equal:.0%} of the prompts only."
        for flag in flagged(document)
    ]
    return lines


def _where(document: Document, model: str, mode: str) -> str:
    return f"{model}: {mode}" if has_several(document) else mode


def _model_facts(entry: Mapping[str, Any], with_label: bool, with_dtype: bool) -> list[str]:
    model = entry["model"]
    name = entry["name"] if with_label else model["name"]
    dtype = f", {entry['dtype']}" if with_dtype else ""
    lines = [f"{name} ({model['architecture']}, {model['parameters'] / 1e6:.1f}M parameters{dtype})"]
    if entry.get("assistant"):
        lines[0] += f", drafts from {entry['assistant']}"
    if "widening" in model:
        size = model["widening"]
        difference = f"largest difference of the logits {size['largest_logit_difference']:.1e}"
        lines.append(f"widened to {size['hidden_size']}x{size['num_layers']}; {difference}")
    if "devices" in model:
        lines.append(f"weights on {', '.join(model['devices'])}")
    return lines


def _gpu_notes(document: Document) -> list[str]:
    lines = [f"Copy bandwidth of the device: {document['copy_bandwidth'] / 1e9:.0f} GB/s."]
    if document["tests"] is not None:
        lines.append(f"Tests: {document['tests']['summary']}")
    lines += [
        f"{entry['shape']}: plain decoding at one token reads its weights at {entry['bandwidth_share']:.0%} of it."
        for entry in document["shapes"]
        if entry["bandwidth_share"] is not None
    ]
    return lines


_NOTES: dict[str, Callable[[Document], list[str]]] = {
    SPEEDS: _speeds_notes,
    COST: lambda _: ["Median of the ratios to one token in the same round; in brackets the 95 % bootstrap interval."],
    REPLAY: _replay_notes,
    MANY: lambda _: [
        "Over plain batches: their seconds over those of generate_many. Equal: prompts with their tokens."
    ],
    PRECISIONS: _precisions_notes,
    GPU: _gpu_notes,
    STEPS: lambda _: [
        "Means a step: torch operations outside the models' forwards, views apart, and reads of a tensor by the host.",
        "Time: of the thread on a CPU, between two events on CUDA, where launches are the profiler's.",
    ],
    DRAFTING: lambda _: [
        "Median seconds of drafting and observing, one thread. Context: tokens made up by Zipf's law."
    ],
}
