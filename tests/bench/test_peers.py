"""Rows of other libraries: each library answers line by line from a process of its own."""

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.peers import process as process_module
from hf_specdec.tools.bench.peers.process import Library, Process, Processes
from hf_specdec.tools.bench.plan import BenchSettings
from hf_specdec.tools.bench.prompts import Prompt, batched
from hf_specdec.tools.bench.rows import PEERS, named_rows, row
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.tables import markdown, notes

PROMPTS = [Prompt("one", "code", ("def main(argv=None):\n",)), Prompt("two", "code", ("import os\n",))]
SETTINGS = BenchSettings(max_new_tokens=6, rounds=1, modes=("greedy",))
ANSWERS = """
import json, sys
for number, line in enumerate(sys.stdin):
    call = json.loads(line)
    if not number:
        print(json.dumps({"versions": {"toy": "1.0", "torch": "2", "transformers": "5"}}))
    elif len(call["ids"]) > 1:
        print(json.dumps({"error": "ValueError: takes one prompt"}))
    elif call["row"] == "dies":
        sys.exit("out of luck")
    else:
        length = len(call["ids"][0])
        print(json.dumps({"token_ids": [[5, 6, 7]], "seconds": 0.5, "cpu_seconds": 0.5, "widths": [length, 3]}))
    sys.stdout.flush()
"""
ADAPTER = """
from contextlib import contextmanager
import torch
from transformers import AutoModelForCausalLM

class Library:
    def __init__(self, setup):
        self.model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=getattr(torch, setup["dtype"])).eval()

    @contextmanager
    def decoder(self, call):
        print("what a library prints is no answer")
        options = {"max_new_tokens": call["max_new_tokens"], "do_sample": False, "pad_token_id": 0}
        yield lambda ids: [self.model.generate(row, **options)[0, row.shape[1]:].tolist() for row in ids]
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mapping[str, Library]:
    """One library, whose process gives the same answer to every call."""
    worker = tmp_path / "worker.py"
    worker.write_text(ANSWERS)
    rows: dict[str, tuple[str, ...]] = {"lookup": (), "dies": (), "eagle3": ("head",)}
    libraries = {"toy": Library(rows, "pip install toy==1.0")}
    monkeypatch.setattr(process_module, "WORKER", worker)
    monkeypatch.setattr(process_module, "LIBRARIES", libraries)
    rows_module = importlib.import_module(row.__module__)
    monkeypatch.setattr(rows_module, "LIBRARIES", libraries)
    return libraries


@pytest.fixture
def with_toy(loaded: LoadedModel, toy: Mapping[str, Library]) -> LoadedModel:
    setup = {"model": "folder", "draft": None, "head": None}
    return dataclasses.replace(loaded, processes=Processes({}, setup))


def test_a_library_is_measured_beside_generate(with_toy: LoadedModel) -> None:
    """By its own times and the counts of its forwards; a batch that it refuses is told."""
    document = Bench([with_toy], batched(PROMPTS, [1, 2]), SETTINGS, rows=["toy:lookup,size=4"]).run()
    (entry,) = document["models"]
    assert entry["rows"][1]["config"] == {"size": 4, "versions": {"toy": "1.0", "torch": "2", "transformers": "5"}}
    summary = entry["summary"]["greedy"]["toy:lookup,size=4"]
    assert summary["errors"] == {"ValueError: takes one prompt": ["2 rows"]}
    assert summary["speed"].keys() == {"code", "overall"}
    assert summary["tokens_per_second"] == 6.0
    assert (summary["tokens_per_step"]["code"], summary["nodes_per_step"]["code"]) == (2.0, 2.0)
    assert summary["share_equal"] == 0.0
    assert "toy:lookup,size=4 (greedy) refuses 2 rows: ValueError: takes one prompt" in notes(document)
    assert "| toy:lookup,size=4 |" in markdown(document) and "toy 1.0 with torch 2, transformers 5" in markdown(
        document
    )


def test_a_process_that_ends_is_a_row_that_says_so(with_toy: LoadedModel) -> None:
    document = Bench([with_toy], PROMPTS[:1], SETTINGS, rows=["toy:dies"]).run()
    (error,) = document["models"][0]["summary"]["greedy"]["toy:dies"]["errors"]
    assert error.startswith("its process ended with 1: ")


def test_rows_without_what_they_need_are_left_out_with_the_reason(with_toy: LoadedModel) -> None:
    rows, left_out = named_rows([PEERS], with_toy)
    names = [row.name for row in rows]
    assert {"generate", "transformers:static", "toy:lookup", "plain", "auto"} <= set(names)
    assert {"toy:eagle3", "eagle3"} <= left_out.keys() and "--head" in left_out["toy:eagle3"]
    with pytest.raises(ConfigError, match="Did you mean 'lookup'"):
        row("toy:lokup", with_toy)


def test_a_missing_library_is_told_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = {"model": "folder", "draft": None, "head": None, "threads": 1}
    libraries = {"not_here": Library({"lookup": ()}, "pip install not-here==2.0")}
    monkeypatch.setattr(process_module, "LIBRARIES", libraries)
    with pytest.raises(SpecError, match=r"not_here.*Install it there: pip install not-here==2\.0"):
        Processes({}, setup).of_row("not_here", "lookup")
    with pytest.raises(ConfigError, match="must be a Python interpreter"):
        Process("not_here", "no/such/python", setup)


def test_the_worker_calls_an_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment with the library is all that it needs; tokens and forwards are those of the library."""
    (tmp_path / "toy_rows.py").write_text(ADAPTER)
    (tmp_path / "toy-1.0.dist-info").mkdir()
    (tmp_path / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process_module, "LIBRARIES", {"toy": Library({"lookup": ()}, "")})
    loaded = load_model(None, peer_pythons={"toy": sys.executable})
    assert loaded.processes is not None
    process = loaded.processes.of_row("toy", "lookup")
    assert process.versions["toy"] == "1.0"
    ids = loaded.tokenizer("def main(argv=None):\n").input_ids
    call: dict[str, Any] = {"row": "lookup", "options": {}, "ids": [ids], "max_new_tokens": 5, "sampling": None}
    answer = process.ask(call | {"seed": 0, "is_watched": True})
    inputs = loaded.tokenizer("def main(argv=None):\n", return_tensors="pt")
    expected = loaded.model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert answer["token_ids"] == [expected[0, len(ids) :].tolist()]
    assert answer["widths"] == [len(ids), 1, 1, 1, 1] and answer["seconds"] > 0
    assert "KeyError" in process.ask({"ids": [ids]})["error"]


def test_a_widened_model_has_no_libraries() -> None:
    assert load_model(None, widen_to=(512, 6)).processes is None
