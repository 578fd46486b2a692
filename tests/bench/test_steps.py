"""What a step costs, and the document of everything that waits for a GPU, tried on a CPU with a tiny shape."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec.common.stats import SpecStats
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench import gpu, gpu_cells, gpu_rows, gpu_shapes
from hf_specdec.tools.bench.document import write_document
from hf_specdec.tools.bench.gpu_shapes import Selection, Shape
from hf_specdec.tools.bench.loaded_model import load_model
from hf_specdec.tools.bench.page import write_page
from hf_specdec.tools.bench.prompts import default_prompts, spread
from hf_specdec.tools.bench.steps import measure_steps
from hf_specdec.tools.bench.tables import markdown, read_document, tables


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return measure_steps(load_model(device="cpu"), spread(default_prompts(), 2), max_new_tokens=24)


@pytest.mark.wide
def test_a_row_for_each_way_says_what_its_steps_ask(document: dict[str, Any]) -> None:
    auto_table, operations = document["tables"]
    rows = {row["name"]: row for row in operations["rows"]}
    plain, auto = rows["plain"], rows["auto, 32 nodes"]
    assert plain["reads"] == 1.0
    assert plain["tokens_per_step"] == 1.0
    assert plain["outside"] > auto["outside"] > 0
    assert auto["reads"] == 0.0, "on a CPU nothing is transferred"
    assert all(row["inside"] > 100 and row["step_ms"] > 0.0 for row in rows.values())
    assert all(row["launches"] is None for row in rows.values())
    assert {name for name, row in rows.items() if row["drafts"]} == {"draft_model"}
    assert rows["draft_model"]["outside"] < plain["outside"] + 20, (
        "what is inside the draft's forwards is no part of it"
    )
    assert [point["num_nodes"] for point in auto_table["rows"]] == [8, 16, 32, 64]


@pytest.mark.wide
def test_its_tables_have_a_line_for_each_row() -> None:
    document = measure_steps(load_model(device="cpu"), default_prompts()[:1], max_new_tokens=12)
    auto, operations = tables(document)
    assert [row[0] for row in operations.rows] == [row["name"] for row in document["tables"][1]["rows"]]
    assert len(auto.rows) == 4


@pytest.mark.wide
def test_the_tiny_shape_goes_the_way_of_the_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(None, dtype="fp32", batches=(1, 2), contexts=(24,), max_new_tokens=6)
    monkeypatch.setattr(gpu, "SHAPES", {"tiny": shape})
    kept: list[int] = []
    document = gpu.measure_gpu(
        [("tiny", Selection(num_texts=1, num_prompts=1))],
        device="cpu",
        keep=lambda so_far: kept.append(len(so_far["tables"][0]["rows"])),
    )
    write_document(document, tmp_path / "gpu.json")
    again = read_document(tmp_path / "gpu.json")
    rows = again["tables"][0]["rows"]
    different = {row["name"] for row in rows if len(set(row["equal"].split(" of "))) > 1}
    assert all(name.startswith("transformers'") and name.endswith("sampled") for name in different), "ours never differ"
    assert all(row["tokens_per_second"] > 0.0 for row in rows)
    ours = [row for row in rows if row["plain_reason"] is None and row["mean_acceptance_length"] is not None]
    expected = {("auto, static cache", 2), ("draft_model", 1), ("eagle3", 2), ("auto+head, static cache, sampled", 1)}
    assert {(row["name"], row["batch"]) for row in ours} >= expected
    assert any(note.startswith("tiny: plain decoding at one token reads its weights at ") for note in again["notes"])
    assert "transformers' assistant" in markdown(again)
    assert kept == [*range(1, len(rows) + 1), len(rows)], "after each row, and at the end"
    (page,) = write_page(again, tmp_path / "gpu.md")
    assert "auto, static cache" in page.read_text()


def cells(monkeypatch: pytest.MonkeyPatch, row: Any, selection: Selection, *batches: int) -> list[dict[str, Any]]:
    """Rows of these batches of eight tokens, measured by `row`."""
    monkeypatch.setattr(gpu_cells, "measure_row", row)
    shape, loaded = Shape(None, dtype="fp32", contexts=(8,)), load_model(device="cpu")
    return [found for batch in batches for found in gpu_cells.measured_cell(shape, loaded, selection, batch, 8)]


def test_rows_without_room_are_left_out_and_the_others_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour's measurement does not end with its largest batch."""

    def row(loaded: Any, texts: Any, max_new_tokens: int, arguments: Any) -> dict[str, Any]:
        full = {1: "eagle3", 2: "lookahead", 4: None}  # methods without room, by the batch
        if arguments["spec_method"] == full[len(texts[0]["input_ids"])]:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")
        return {"tokens_per_second": 10.0, "digests": [""]}

    found = cells(monkeypatch, row, Selection(), 1, 2, 4)
    assert {row["batch"] for row in found if "reason" not in row} == {1, 2}
    reasons = {(row["name"], row["batch"]): row["reason"] for row in found if "reason" in row}
    assert {name for name, batch in reasons if batch == 2} == {"lookahead", "lookahead, static cache"}
    assert reasons["lookahead", 2] == reasons["plain, eager", 4] == "CUDA out of memory."
    assert reasons["auto", 4] == "plain generate, which it is compared with, was left out"


def test_a_selection_has_plain_generate_and_the_rows_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(loaded: Any, texts: Any, max_new_tokens: int, arguments: Any) -> dict[str, Any]:
        assert len({tuple(text["input_ids"].flatten().tolist()) for text in texts}) == len(texts) == 3
        return {"tokens_per_second": 10.0, "digests": [""]}

    def names_of(*rows: str) -> list[str]:
        return [row["name"] for row in cells(monkeypatch, row, Selection(rows=rows, num_texts=2), 2)]

    static = ["plain, static cache", "auto", "auto, static cache"]
    assert names_of("auto*", "plain, static cache") == static
    assert names_of("auto") == ["plain, eager", "auto"]
    assert names_of("none of these") == []


def test_all_rows_have_the_attention_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(loaded: Any, texts: Any, max_new_tokens: int, arguments: Any) -> dict[str, Any]:
        enabled.append((torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return {"tokens_per_second": 10.0, "digests": [""]}

    for backend, expected in {None: (True, True), "math": (True, False), "flash_attention": (False, True)}.items():
        enabled: list[tuple[bool, bool]] = []
        cells(monkeypatch, row, Selection(rows=("auto", "plain, eager"), sdpa_backend=backend), 2)
        assert enabled == [expected] * 2
    assert torch.backends.cuda.flash_sdp_enabled()


def test_rows_over_static_caches_are_compiled_as_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain generate's and this package's alike."""
    seen: dict[str, Any] = {}

    def row(loaded: Any, texts: Any, max_new_tokens: int, arguments: Any) -> dict[str, Any]:
        config = arguments.get("compile_config")
        seen[str(arguments["spec_method"])] = None if config is None else (config.mode, config.options)
        return {"tokens_per_second": 10.0, "digests": [""]}

    rows = ("plain, static cache", "auto, static cache", "lookahead")
    cells(monkeypatch, row, Selection(rows=rows, compile_options={"max_autotune": True}), 2)
    assert seen == dict.fromkeys(("None", "auto"), (None, {"max_autotune": True})) | {"lookahead": None}
    cells(monkeypatch, row, Selection(rows=rows, compile_mode="max-autotune"), 2)
    assert seen["None"] == seen["auto"] == ("max-autotune", None)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(compile_options={"max_autotune": True}, compile_mode="default"),
        Selection(compile_options={"no_such_option": 1}),
        Selection(compile_options={"max_autotune": "yes"}),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_model_is_loaded(selection: Selection) -> None:
    with pytest.raises(ConfigError, match="compile_option"):
        gpu.measure_gpu([("tiny", selection)], device="cpu")


def test_an_option_is_a_name_and_a_value() -> None:
    assert gpu._read_option("triton.cudagraphs=true") == ("triton.cudagraphs", True)
    assert gpu._read_option("max_autotune_gemm_backends=ATEN,TRITON") == ("max_autotune_gemm_backends", "ATEN,TRITON")
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        gpu._read_option("max_autotune")


def test_a_profile_names_what_a_call_asks_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(None, dtype="fp32", batches=(1,), contexts=(8,), max_new_tokens=4)
    monkeypatch.setattr(gpu, "SHAPES", {"tiny": shape})
    chosen = Selection(rows=("plain, eager", "auto"), steps=False, num_texts=1, profiles=True)
    document = gpu.measure_gpu([("tiny", chosen)], device="cpu")
    write_document(document, tmp_path / "gpu.json")
    text = markdown(read_document(tmp_path / "gpu.json"))
    for name, table in zip(("plain, eager", "auto"), document["tables"][2:], strict=True):
        times = [kernel["seconds"] for kernel in table["rows"]]
        assert times == sorted(times, reverse=True)
        assert 0.0 < sum(kernel["share"] for kernel in table["rows"]) <= 1.0
        assert f"tiny, {name}, 1 x 8: the device works" in text
    assert "aten::" in text


def test_calls_in_which_graphs_are_made_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text is written until nothing compiles; a token after the first is one without the prompt's forward."""
    compiling, calls = [3.0, 1.0, 0.0, 0.5, 0.0], list[int]()

    def timed(model: Any, options: Any) -> gpu_rows._Call:
        length = options["max_new_tokens"]
        stats = SpecStats(compile_seconds=compiling[len(calls)] if length > 1 else 0.0)
        calls.append(length)
        return gpu_rows._Call([[7] * length], stats, 0.2 + 0.1 * (length - 1) + stats.compile_seconds)

    monkeypatch.setattr(gpu_rows, "_timed", timed)
    texts = [{"input_ids": torch.zeros(1, 4, dtype=torch.long)}] * 3
    row = gpu_rows.measure_row(load_model(device="cpu"), texts, 11, {"spec_method": "auto"})
    assert calls == [11] * 5 + [1] * 2
    assert row["tokens_per_second"] == pytest.approx(11 / 1.2)
    assert row["later_token_ms"] == pytest.approx(100)
    assert (row["first_call_seconds"], row["compile_seconds"], row["later_compile_seconds"]) == (4.2, 4.0, 0.5)


@pytest.mark.parametrize("stage", ["loading the model", "what a step costs"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory.\nTried"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["accelerator", "host"],
)
def test_a_shape_without_room_is_left_out_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str, error: Exception
) -> None:
    """Each shape is in the document on the disk before the next one is loaded."""
    shapes = {name: Shape(None, dtype="fp32", contexts=(8,)) for name in ("small", "large")}
    output, started = tmp_path / "gpu.json", list[str]()
    real = gpu.load_model

    def fail_at_the_second(what: str) -> None:
        started.append(what)
        if started.count(what) == 2 and what == stage:
            assert read_document(output)["tables"][0]["title"] == "small"
            raise error

    def load(**options: Any) -> Any:
        fail_at_the_second("loading the model")
        return real(**options)

    def steps(*_: Any, **__: Any) -> None:
        fail_at_the_second("what a step costs")

    monkeypatch.setattr(gpu, "SHAPES", shapes)
    monkeypatch.setattr(gpu, "load_model", load)
    monkeypatch.setattr(gpu, "fill_steps", steps)
    monkeypatch.setattr(gpu, "_copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(gpu, "measured_cell", lambda *_: [])
    gpu.main(output, shape=["small", "large"], device="cpu", num_prompts=1)
    left_out = {table["title"]: table["rows"] for table in read_document(output)["tables"]}
    reason = str(error).partition("\n")[0]
    assert left_out["small, left out"] == []
    assert left_out["large, left out"] == [{"name": stage, "reason": reason}]
    assert f"| {stage} | - | - | {reason} |" in output.with_suffix(".md").read_text()


def test_the_figures_are_tried_on_a_cpu_and_go_on_where_their_document_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, how = tmp_path / "gpu.json", {"shape": ["tiny"], "figures": True, "device": "cpu"}
    monkeypatch.setattr(gpu, "SHAPES", {"tiny": Shape(None, dtype="fp32", contexts=(16,), max_new_tokens=4)})
    gpu.main(output, **how, max_minutes=0.0)
    rows, left_out = (table["rows"] for table in read_document(output)["tables"])
    assert not rows
    assert {row["reason"] for row in left_out} == {"no time was left"}
    real, name, is_slow = gpu_cells.measure_row, "spec_method=plain, static cache", True

    def slow(*arguments: Any) -> dict[str, Any]:
        while is_slow and arguments[-1]["spec_method"] == "plain":  # never ends
            pass
        return real(*arguments)

    monkeypatch.setattr(gpu_cells, "measure_row", slow)
    shortened = [
        (shape, replace(part, row_seconds=12.0, rows=tuple(row for row in part.rows if ":" not in row)))
        for shape, part in gpu_shapes.FIGURES
    ]
    monkeypatch.setattr(gpu_shapes, "FIGURES", shortened)
    gpu.main(output, **how)
    first = read_document(output)["tables"]
    done, late = first[0]["rows"], {row["name"]: row["reason"] for row in first[1]["rows"]}
    assert late == {name: "took longer than 12 s"}
    is_slow = False
    gpu.main(output, **how)
    again = read_document(output)
    assert again["is_complete"]
    assert again["tables"][0]["rows"][: len(done)] == done
    assert [row["name"] for row in again["tables"][0]["rows"][len(done) :]] == [name]
    assert not again["tables"][1]["rows"]


def test_matrix_products_that_do_not_compile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> list[dict[str, Any]]:
        if not found:
            raise ValueError("no such instruction\nat line 3")
        return found

    found: list[dict[str, Any]] = []
    module = SimpleNamespace(measure_products=measure, COLUMNS={"product": "{name}"})
    monkeypatch.setitem(sys.modules, "hf_specdec.tools.bench.gpu_products", module)
    document: dict[str, Any] = {"tables": [], "copy_bandwidth": 1e12}
    how = (document, "7B", gpu_shapes.SHAPES["7B"], torch.device("cuda"))
    assert gpu._add_products(*how) == [{"name": "matrix products", "reason": "no such instruction"}]
    assert not document["tables"]
    found.append({"name": "down"})
    assert gpu._add_products(*how) == []
    assert [table["rows"] for table in document["tables"]] == [found]


def test_large_shapes_without_an_accelerator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "pick_device", lambda name: torch.device("cpu"))
    with pytest.raises(ConfigError, match="`shape` must be tiny where there is no accelerator, but is '1B, 7B'"):
        gpu.measure_gpu([("1B", Selection()), ("7B", Selection())])


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        gpu.measure_gpu([("tini", Selection())], device="cpu")
