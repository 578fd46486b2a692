"""Rows of the GPU benchmark by other libraries, and those that round alike."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import SpecError
from hf_specdec.tools.bench import gpu_cells, gpu_peers
from hf_specdec.tools.bench.gpu_rows import TimeUp, digest_of
from hf_specdec.tools.bench.gpu_shapes import Selection, Shape
from hf_specdec.tools.bench.loaded_model import load_model
from hf_specdec.tools.bench.peers.process import Process, Processes

SHAPE = Shape(None, dtype="fp32", contexts=(8,))
TEXTS = [{"input_ids": torch.tensor([[place, 2]])} for place in range(3)]


class Toy:
    """In the place of processes and of one of them: writes a text's first token again, in half a second a token."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.calls: list[dict[str, Any]] = []

    def of_row(self, library: str, row: str) -> "Toy":
        if self.error:
            raise SpecError(self.error)
        return self

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(asked)
        count = asked["max_new_tokens"]
        return {"token_ids": [[asked["ids"][0][0]] * count], "seconds": 0.5 * count}


def measured(monkeypatch: pytest.MonkeyPatch, rows: Any, selection: Selection, **fields: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(gpu_cells, "measure_row", rows)
    loaded = dataclasses.replace(load_model(device="cpu"), **fields)
    return list(gpu_cells.measured_cell(SHAPE, loaded, selection, 1, 8))


def test_a_row_counts_the_calls_after_the_first_text() -> None:
    toy = Toy()
    row = gpu_peers.measure_peer(toy, "economize:lookup", TEXTS, 4)  # type: ignore[arg-type]
    assert row["tokens_per_second"] == 2.0
    assert row["later_token_ms"] == pytest.approx(500.0)
    assert row["digests"] == [digest_of([[place] * 4]) for place in range(3)]
    assert [call["ids"][0][0] for call in toy.calls] == [0, 0, 1, 2, 1, 2]
    assert all(call["is_kept"] and call["options"] == {"cuda_graphs": True} for call in toy.calls)


def test_a_library_that_takes_too_long_is_ended() -> None:
    """Else its answer would be taken for that of the next row."""
    processes = Processes({}, {"draft": None})
    process = Process.__new__(Process)
    ended: list[bool] = []

    def ask(asked: Any) -> dict[str, Any]:
        raise TimeUp

    process.ask, process.end = ask, lambda: ended.append(True)  # type: ignore[method-assign, assignment]
    processes._started["flashspec"] = process
    with pytest.raises(TimeUp):
        gpu_peers.measure_peer(processes, "flashspec:lookup", TEXTS, 4)
    assert ended and "flashspec" not in processes._started


def test_a_library_that_is_not_there_is_left_out_by_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(*_: Any) -> dict[str, Any]:
        return {"tokens_per_second": 10.0, "digests": [""]}

    chosen = Selection(rows=("plain, eager*", "flashspec:*"))
    found = measured(monkeypatch, row, chosen, processes=Toy("flashspec does not start"))
    reasons = {row["name"]: row.get("reason") for row in found}
    assert reasons["flashspec:lookup"] == reasons["flashspec:composite"] == "flashspec does not start"
    assert len(found) == 4, "plain generate greedily and sampled, the libraries greedily"


def test_libraries_get_a_model_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_peers, "Processes", lambda pythons, setup: told.append(setup))
    loaded = load_model(device="cpu", widen_to=(512, 6))
    with gpu_peers.with_peers(loaded, {}):
        own = AutoModelForCausalLM.from_pretrained(told[0]["model"])
        assert (own.config.hidden_size, own.config.num_hidden_layers) == (512, 6)
        assert told[0]["dtype"] == "float32" and Path(told[0]["draft"]).is_dir()
    assert not Path(told[0]["model"]).exists()


def test_rows_in_order_are_compared_with_plain_decoding_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(loaded: Any, texts: Any, max_new_tokens: int, arguments: Any) -> dict[str, Any]:
        assert max_new_tokens == 5
        in_order = state_of(loaded.model).plain_kernels
        seen.append((arguments["spec_method"], in_order))
        return {"tokens_per_second": 10.0, "digests": ["in order" if in_order else "", arguments["spec_method"] or ""]}

    seen: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(gpu_cells, "why_unordered", lambda device: None)
    rows = (
        "plain, static cache",
        "auto, static cache",
        "*plain, static cache, in order",
        "auto, static cache, in order",
    )
    found = measured(monkeypatch, row, Selection(rows=rows, max_new_tokens=5))
    assert seen == [(None, False), ("auto", False), ("plain", True), ("auto", True)]
    assert [row["equal"] for row in found] == ["2 of 2", "1 of 2", "2 of 2", "1 of 2"]
