"""A run measures every row on every prompt in turn, and goes on where its file ends."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec.common.stats import SpecStats
from hf_specdec.engine.model_state import state_of, using_method_state
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench import run as run_module
from hf_specdec.tools.bench.header import make_header
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.measure import digest_of
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.records import Records, read_records
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS, make_rows
from hf_specdec.tools.bench.run import BenchSettings, measure
from tests.bench.conftest import PROMPTS, ROWS, SETTINGS, records_of

NUM_ROWS = 2 + len(ROWS)


def watched(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    """Let `before` see the loaded model and the row of each call."""
    real = run_module.measured_call

    def call(loaded: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        before(loaded, row)
        return real(loaded, row, *args, **kwargs)

    monkeypatch.setattr(run_module, "measured_call", call)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    count = iter(range(calls))

    def before(*_: Any) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt

    watched(monkeypatch, before)


def test_every_row_meets_every_prompt_in_every_round(measured: Records) -> None:
    keys = Counter((record["row"], record["prompt"], record["round"]) for record in measured.records)
    assert len(keys) == NUM_ROWS * len(PROMPTS) * 3
    assert set(keys.values()) == {1}
    assert all(record["num_tokens"] == 8 and record["seconds"] > 0 for record in measured.records)


def test_rows_take_turns_and_another_one_begins_each_time(measured: Records) -> None:
    first = [measured.records[start]["row"] for start in range(0, len(measured.records), NUM_ROWS)]
    assert set(Counter(first).values()) <= {2, 3}
    for start in range(0, len(measured.records), NUM_ROWS):
        turn = measured.records[start : start + NUM_ROWS]
        assert len({record["row"] for record in turn}) == NUM_ROWS
        assert len({(record["prompt"], record["round"]) for record in turn}) == 1


def test_texts_are_those_of_generate(loaded: LoadedModel, measured: Records) -> None:
    inputs = loaded.tokenizer(PROMPTS[0].text, return_tensors="pt")
    tokens = loaded.model.generate(**inputs, max_new_tokens=8, do_sample=False, spec_method=None)
    new = tokens[0, inputs.input_ids.shape[1] :].tolist()
    assert {record["digest"] for record in measured.records if record["prompt"] == "copy"} == {digest_of([new])}


def test_the_watched_round_counts_steps_alike(loaded: LoadedModel, measured: Records) -> None:
    inputs = loaded.tokenizer(PROMPTS[0].text, return_tensors="pt")
    kwargs: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    stats: SpecStats = loaded.model.generate(**inputs, **kwargs, spec_method="prompt_lookup").spec_stats
    steps = {record["row"]: record for record in measured.records if record["prompt"] == "copy" and not record["round"]}
    assert steps["prompt_lookup"]["num_steps"] == stats.num_drafts
    for record in steps.values():
        assert record["num_step_tokens"] <= 7  # the prompt's forward gives at least one of eight
        assert 0 < record["first_token_seconds"] < record["seconds"]
    for name in (TRANSFORMERS, PLAIN):
        assert steps[name]["num_steps"] == steps[name]["num_step_tokens"] == 7
    assert not any("num_steps" in record for record in measured.records if record["round"])


def test_samples_follow_a_seed_for_each_round(loaded: LoadedModel) -> None:
    records = records_of(loaded, BenchSettings(max_new_tokens=8, do_sample=True, seed=3), rounds=2).records
    texts = {(record["row"], record["prompt"], record["round"]): record["digest"] for record in records}
    assert texts[PLAIN, "main", 1] != texts[PLAIN, "main", 2]
    for (row, prompt, number), digest in texts.items():
        if row != "transformers:prompt_lookup":
            assert digest == texts[TRANSFORMERS, prompt, number]


def test_every_round_begins_without_a_memory_and_each_row_has_its_own(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no call drafts from an answer to the same prompt, and the model's memory is left alone."""
    seen: list[tuple[str, MethodState, int]] = []

    def before(loaded: LoadedModel, row: Any) -> None:
        state = state_of(loaded.model).method_state
        seen.append((row.name, state, len(state.by_name)))

    own = MethodState()
    with using_method_state(loaded.model, own):
        watched(monkeypatch, before)
        records_of(loaded, rows=["auto", "prompt_lookup:pool=shared"])
        assert state_of(loaded.model).method_state is own and not own.by_name
    for name in ("auto", "prompt_lookup:pool=shared"):
        states = [state for row, state, _ in seen if row == name]
        assert [size > 0 for row, _, size in seen if row == name] == [False, True, True] * 2
        assert states[0] is states[2] and states[2] is not states[3]


@pytest.mark.parametrize("cut", [0, 7], ids=["whole lines", "a line cut off"])
def test_an_interrupted_run_goes_on_where_its_file_ends(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    path, rows = tmp_path / "records.jsonl", make_rows(ROWS, loaded)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 9)
        measure(loaded, PROMPTS, rows, SETTINGS, Records(make_header(loaded, SETTINGS), path), rounds=1)
    text = path.read_text()
    path.write_text(text[: len(text) - cut])
    calls: list[str] = []
    watched(monkeypatch, lambda _, row: calls.append(row.name))
    measure(loaded, PROMPTS, rows, SETTINGS, Records(make_header(loaded, SETTINGS), path), rounds=1)
    _, records = read_records(path)
    assert len(calls) == 2 * NUM_ROWS * len(PROMPTS) - 8  # one more, or that of the row which round 0 has done before
    keys = Counter((record["row"], record["prompt"], record["round"]) for record in records)
    assert len(keys) == 2 * NUM_ROWS * len(PROMPTS) and set(keys.values()) == {1}
    calls.clear()
    more = Records(make_header(loaded, SETTINGS), path)
    measure(loaded, PROMPTS[:1], make_rows([*ROWS, "lookahead"], loaded), SETTINGS, more, rounds=1)
    assert calls == ["lookahead"] * 2  # a row that is new is measured alone


def test_a_file_of_another_measurement_is_not_continued(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with Records(make_header(loaded, SETTINGS), path):
        pass
    with pytest.raises(ConfigError, match="`output` must have the settings of this run"):
        Records(make_header(loaded, BenchSettings(max_new_tokens=9)), path)
    with pytest.raises(ConfigError, match="`output` must have the dtype of this run"):
        Records({**make_header(loaded, SETTINGS), "dtype": "bfloat16"}, path)


@pytest.mark.parametrize("text", ["", "[]\n", "{\n", '{"a": 1}\n', '{"header": {}}\n{"row": "x"}\n', '{"header": 5}\n'])
def test_a_file_of_something_else_is_an_error_and_left_alone(loaded: LoadedModel, tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="`path` must be a file of records"):
        read_records(path)
    if text:
        with pytest.raises(ConfigError, match="`output` must be a file of records"):
            Records(make_header(loaded, SETTINGS), path)
    assert path.read_text() == text


def test_no_call_begins_after_the_time_is_up(loaded: LoadedModel) -> None:
    assert not records_of(loaded, max_seconds=0.0).records


def test_what_transformers_refuses_is_a_record_of_its_reason(loaded: LoadedModel) -> None:
    records = records_of(loaded, BenchSettings(max_new_tokens=4, batch_size=3)).records
    errors = {record["row"]: record["error"] for record in records if "error" in record}
    assert list(errors) == ["transformers:prompt_lookup"] and "batch_size = 1" in errors["transformers:prompt_lookup"]
    assert {record["task"] for record in records} == {"batches of 3"}
    assert {record["prompt"] for record in records} == {"copy to import"}
    texts = {record["digest"] for record in records if "error" not in record}
    assert len(texts) == 1
    assert {record["num_tokens"] for record in records if "error" not in record} == {12}


def test_static_caches_have_room_for_the_longest_prompt(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One size for all prompts, so that nothing is compiled anew; a CPU compiles nothing."""
    assert SETTINGS.kwargs(100) == {"max_new_tokens": 8, "do_sample": False}
    settings = BenchSettings(max_new_tokens=8, cache="static")
    assert settings.kwargs(100) | {"max_cache_len": 0} == {
        **SETTINGS.kwargs(100),
        "cache_implementation": "static",
        "max_cache_len": 0,
    }
    records = records_of(loaded, settings, prompts=PROMPTS[:2]).records
    assert not [record for record in records if "error" in record]
    assert len({record["digest"] for record in records if record["prompt"] == "copy"}) == 1


def test_prompts_that_the_model_has_no_positions_for_are_left_out(loaded: LoadedModel) -> None:
    long = Prompt("long", "text", "a = 1\n" * 200)
    records = records_of(loaded, prompts=[long, PROMPTS[0]]).records
    assert {record["prompt"] for record in records} == {"copy"}
    with pytest.raises(ConfigError, match="`prompts` must hold 1 prompts that leave room for 8 of 512 positions"):
        records_of(loaded, prompts=[long])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"temperature": 0.7}, "`temperature` must come with do_sample"),
        ({"temperature": 0.0, "do_sample": True}, "`temperature` must be"),
        ({"cache": "paged"}, "`cache` must be one of dynamic, static"),
    ],
)
def test_settings_that_cannot_be_are_errors(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        BenchSettings(**settings)


def test_the_header_says_what_a_stranger_needs(loaded: LoadedModel) -> None:
    header = json.loads(json.dumps(make_header(loaded, SETTINGS)))
    assert (header["model"], header["dtype"], header["device"]) == ("tiny", "float32", "cpu")
    assert header["threads"] == torch.get_num_threads()
    assert header["settings"]["max_new_tokens"] == 8
    assert {"python", "hf_specdec", "torch", "transformers"} == set(header["versions"])
