"""The table of a journal: tests that pass, calls that speculate, and why others do not."""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("transformers", "torch", "accelerate")
ROWS = ("tests", "passed", "calls", "compared", "in_batches", "drafted", "accepted", "undrafted", "plain", "refused")
MOST_REASONS = 12


def read_journal(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Outcomes by test and method; of a run's two lines the last one counts."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return {(line["test"], line["method"]): line for line in lines}


def document(journal: Path, methods: list[str]) -> dict[str, Any]:
    """The journal's counts as JSON values."""
    outcomes = list(read_journal(journal).values())
    plain = [one for one in outcomes if one["method"] == "plain"]
    passing = {one["test"] for one in plain if one["outcome"] == "passed" and one["calls"]}
    runs = {
        method: [one for one in outcomes if (one["method"], one["test"] in passing) == (method, True)]
        for method in methods
    }
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "families": len({test.split("/")[2] for test in passing if test.startswith("tests/models/")}),
        "plain_tests": dict(Counter(one["outcome"] for one in plain)),
        "tests_that_generate_and_pass": len(passing),
        "methods": {method: _counts(runs[method]) for method in methods},
    }


def _counts(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    failing = {one["test"]: one["error"] for one in outcomes if one["outcome"] != "passed"}
    calls = [call for one in outcomes for call in one["calls"] if call["kind"] not in ("left", "raises")]
    kinds = Counter(call["kind"] for call in calls)
    taken = len(calls) - kinds["refused"]
    return {
        "tests": len(outcomes),
        "passed": len(outcomes) - len(failing),
        "calls": len(calls),
        "compared": sum(call.get("is_compared", False) for call in calls),
        "in_batches": sum(call.get("num_rows", 0) > 1 for call in calls),
        "accepted": sum(call.get("num_accepted", 0) > 0 for call in calls),
        **kinds,
        "share_speculating": (kinds["drafted"] + kinds["undrafted"]) / max(taken, 1),
        "share_drafted": kinds["drafted"] / max(taken, 1),
        **{kind + "_reasons": dict(_reasons(calls, kind).most_common()) for kind in ("plain", "refused")},
        "failing": failing,
    }


def _reasons(calls: list[dict[str, Any]], kind: str) -> Counter[str]:
    return Counter(call["reason"] for call in calls if call["kind"] == kind)


def table(found: dict[str, Any]) -> str:
    """The document for a reader."""
    methods = found["methods"]
    lines = [", ".join(f"{name} {value}" for name, value in found["versions"].items())]
    lines += [f"{found['families']} families, {found['tests_that_generate_and_pass']} tests generate and pass plainly"]
    lines += ["", " " * 18 + "".join(f"{method:>15}" for method in methods)]
    lines += [f"{row:<18}" + "".join(f"{counts.get(row, 0):>15}" for counts in methods.values()) for row in ROWS]
    for row in ("share_speculating", "share_drafted"):
        lines += [f"{row:<18}" + "".join(f"{counts[row]:>15.1%}" for counts in methods.values())]
    for method, counts in methods.items():
        for kind in ("plain", "refused"):
            reasons = list(counts[kind + "_reasons"].items())[:MOST_REASONS]
            lines += ["", f"{method}, {kind}:", *(f"{count:>7}  {reason}" for reason, count in reasons)]
        failing = (f"  {test}: {error.strip()[:300]}" for test, error in counts["failing"].items())
        lines += ["", f"{method}, failing:", *failing]
    return "\n".join(lines)
