"""A run measures every row on every prompt, tells equal from unequal, and can be interrupted anywhere."""

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

import hf_specdec.engine.loop
from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.verify import VerifyResult
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plan import WATCHED_ROUND, BenchSettings
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.speeds import flagged
from tests.bench.conftest import PROMPTS, ROWS, SETTINGS

NUM_TURNS = sum(len(prompt.turns) for prompt in PROMPTS)
ONE_ROUND = BenchSettings(max_new_tokens=8, rounds=1)
TIMES = ("seconds", "cpu_seconds", "draft_seconds", "first_token_seconds", "peak_memory_bytes")


def bench(
    loaded: LoadedModel,
    *names: str,
    settings: BenchSettings = SETTINGS,
    prompts: Sequence[Prompt] = PROMPTS,
    **kwargs: Any,
) -> Bench:
    return Bench([loaded], prompts, settings, rows=names or ROWS, **kwargs)


def entry_of(document: dict[str, Any]) -> dict[str, Any]:
    """The one model's."""
    (entry,) = document["models"]
    return cast("dict[str, Any]", entry)


def flags(document: dict[str, Any]) -> list[tuple[str, str, float]]:
    """What is flagged on the one model."""
    return [tuple(flag[1:]) for flag in flagged(document)]


def calls(entry: dict[str, Any], *, is_watched: bool) -> list[dict[str, Any]]:
    """Records of watched calls, or of timed ones."""
    return [record for record in entry["records"] if (record["round"] == WATCHED_ROUND) is is_watched]


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what differs from run to run."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def test_every_row_meets_every_turn_in_every_round(entry: dict[str, Any]) -> None:
    num_rows, num_modes = 1 + len(ROWS), 2
    assert len(calls(entry, is_watched=True)) == num_rows * num_modes * NUM_TURNS
    assert len(calls(entry, is_watched=False)) == num_rows * num_modes * NUM_TURNS * SETTINGS.rounds
    assert all(record["num_tokens"] == SETTINGS.max_new_tokens for record in entry["records"])


def test_rows_of_ours_are_equal_greedy_and_sampled(measured: dict[str, Any], entry: dict[str, Any]) -> None:
    for mode in ("greedy", "sampled"):
        for row in ("plain", "prompt_lookup"):
            assert entry["summary"][mode][row]["share_equal"] == 1.0
    assert entry["summary"]["greedy"]["transformers:prompt_lookup"]["share_equal"] == 1.0
    assert not flagged(measured)


def test_rounds_are_sampled_from_seeds_of_their_own(entry: dict[str, Any]) -> None:
    texts = {
        (record["mode"], record["round"]): record["token_ids"]
        for record in calls(entry, is_watched=False)
        if record["row"] == REFERENCE and record["prompt"] == "new"
    }
    assert texts["greedy", 0] == texts["greedy", 1]
    assert texts["sampled", 0] != texts["sampled", 1]


def test_what_a_probe_counts_is_what_was_emitted(entry: dict[str, Any]) -> None:
    for probe in calls(entry, is_watched=True):
        assert sum(probe["blocks"]) == probe["num_tokens"]
        assert len(probe["blocks"]) == len(probe["drafted"])
        assert all(count <= drafted + 1 for count, drafted in zip(probe["blocks"], probe["drafted"], strict=True))
        assert probe["first_token_seconds"] > 0
        if probe["row"] in (REFERENCE, "plain"):
            assert set(probe["blocks"]) == {1} and set(probe["drafted"]) == {0}


def test_mean_acceptance_length_is_the_engine_s(loaded: LoadedModel, entry: dict[str, Any]) -> None:
    inputs = loaded.tokenizer(PROMPTS[0].turns[0], return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    stats = loaded.model.generate(**inputs, **options, spec_method="prompt_lookup").spec_stats
    wanted = ("greedy", "prompt_lookup", "copy")
    (probe,) = (p for p in calls(entry, is_watched=True) if (p["mode"], p["row"], p["prompt"]) == wanted)
    assert len(probe["blocks"]) == stats.num_drafts + 1
    assert sum(probe["drafted"]) == stats.num_draft_tokens


def test_a_second_turn_follows_the_reference_s_answer(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = bench(loaded, "plain", settings=ONE_ROUND)
    tokenize = type(loaded.tokenizer).__call__

    def listen(self: Any, text: str, **kwargs: Any) -> Any:
        seen.append(text)
        return tokenize(self, text, **kwargs)

    monkeypatch.setattr(type(loaded.tokenizer), "__call__", listen)
    run.run()
    answers = {
        loaded.tokenizer.decode(record["token_ids"], skip_special_tokens=True)
        for record in entry_of(run.document)["records"]
        if record["row"] == REFERENCE and record["prompt"] == "talk" and record["turn"] == 0
    }
    assert answers <= {text.removeprefix("import os\n\n\n").removesuffix("\n\nimport sys\n") for text in seen}


@pytest.mark.wide  # test_command.py interrupts and resumes too
@pytest.mark.parametrize("after", [1, 5, 9, 17])
def test_an_interrupted_run_continues_to_the_same_records(
    loaded: LoadedModel, measured: dict[str, Any], entry: dict[str, Any], after: int
) -> None:
    first = bench(loaded)

    def interrupt(what: str, number: int, total: int) -> None:
        if number == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(interrupt)
    assert not first.document["is_complete"]
    partial = entry_of(first.document)
    assert len(partial["records"]) == after * (1 + len(ROWS))
    assert partial["summary"]["greedy"]["plain"]["share_equal"] == 1.0
    whole = bench(loaded, document=first.document).run()
    assert whole["is_complete"] and measured["is_complete"]
    assert untimed(entry_of(whole)["records"]) == untimed(entry["records"])
    assert entry_of(whole)["summary"].keys() == entry["summary"].keys()


@pytest.mark.wide
def test_a_finished_run_can_be_given_more_rounds(loaded: LoadedModel, document: dict[str, Any]) -> None:
    more = BenchSettings(max_new_tokens=8, rounds=3)
    before = len(calls(entry_of(document), is_watched=False))
    after = bench(loaded, settings=more, document=document).run()
    assert len(calls(entry_of(after), is_watched=False)) == before * 3 // 2


@pytest.mark.parametrize("what", ["settings", "rows", "hardware", "kind"])
def test_another_run_s_document_is_refused(loaded: LoadedModel, document: dict[str, Any], what: str) -> None:
    settings, names = SETTINGS, ROWS
    if what == "settings":
        settings = BenchSettings(max_new_tokens=9, rounds=2)
    elif what == "rows":
        names = ROWS[:2]
    elif what == "hardware":
        document["header"]["hardware"]["cpu"] = "another"
    else:
        document["kind"] = "cost"
    with pytest.raises(ConfigError, match="resume"):
        bench(loaded, *names, settings=settings, document=document)


@pytest.mark.wide
def test_a_candidate_generator_whose_verification_is_broken_is_flagged(loaded: LoadedModel) -> None:
    names = ("tests.bench.wrong_rows:HonestCandidates", "tests.bench.wrong_rows:WrongContext")
    document = bench(loaded, *names, settings=ONE_ROUND).run()
    assert ("greedy", names[1]) in [(flag.mode, flag.row) for flag in flagged(document)]
    assert names[0] not in [flag.row for flag in flagged(document)]
    assert entry_of(document)["summary"]["greedy"][names[0]]["draft_share"] is not None


@pytest.mark.wide
def test_a_row_that_writes_into_the_prompt_harms_only_itself(loaded: LoadedModel) -> None:
    """Every row reads a prompt of its own, so an innocent one next to it is not flagged."""
    wrong = "tests.bench.wrong_rows:WritesIntoTheText"
    document = bench(loaded, wrong, "plain", settings=ONE_ROUND).run()
    assert {flag.row for flag in flagged(document)} == {wrong}


def test_an_engine_whose_verification_is_broken_is_flagged(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on below a drafted token whatever the target chose, so the target answers another text."""

    def gullible(tree: DraftTree, choose: Callable[[int], tuple[int, bool]]) -> VerifyResult:
        node, path, tokens = 0, [0], []
        while True:
            token, stop = choose(node)
            tokens.append(token)
            children = tree.children(node)
            if stop or not children:
                return VerifyResult(tokens, path)
            node = children[0]
            path.append(node)

    monkeypatch.setattr(hf_specdec.engine.sequence, "verify_tree", gullible)
    guesses = "tests.bench.wrong_rows:GuessingDrafter"
    found = {(mode, row) for mode, row, _ in flags(bench(loaded, "plain", guesses, settings=ONE_ROUND).run())}
    assert found == {("greedy", guesses), ("sampled", guesses)}


def test_a_drafter_that_is_wrong_is_still_equal(loaded: LoadedModel) -> None:
    guesses = "tests.bench.wrong_rows:GuessingDrafter"
    assert not flagged(bench(loaded, guesses, settings=ONE_ROUND, prompts=PROMPTS[:2]).run())


def test_half_precision_is_reported_and_not_flagged(document: dict[str, Any]) -> None:
    entry_of(document)["summary"]["greedy"]["plain"]["share_equal"] = 0.5
    assert flags(document) == [("greedy", "plain", 0.5)]
    entry_of(document)["dtype"] = "bfloat16"
    assert flagged(document) == []


def test_a_row_that_promises_no_seeds_is_not_flagged_for_sampling(document: dict[str, Any]) -> None:
    for mode in ("greedy", "sampled"):
        entry_of(document)["summary"][mode]["transformers:prompt_lookup"]["share_equal"] = 0.5
    assert flags(document) == [("greedy", "transformers:prompt_lookup", 0.5)]


def test_a_transformers_row_that_refuses_the_model_says_why(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("assisted generate is not supported")

    monkeypatch.setattr(type(loaded.model), "_assisted_decoding", refuse)
    rows = ("transformers:prompt_lookup", "plain")
    entry = entry_of(bench(loaded, *rows, settings=ONE_ROUND, prompts=PROMPTS[:1]).run())
    summary = entry["summary"]["greedy"]
    assert summary["transformers:prompt_lookup"]["errors"] == {"assisted generate is not supported": ["repeat"]}
    assert summary["transformers:prompt_lookup"]["speed"] == {}
    assert summary["plain"]["errors"] == {} and summary["plain"]["speed"]["overall"]["count"] == 1


def test_no_call_drafts_from_an_answer_to_its_own_prompt(loaded: LoadedModel) -> None:
    """A shared pool is empty when a round begins, and no row sees another's."""
    shared = 'prompt_lookup={"pool": "shared"}'
    once = [Prompt("new", "fresh", PROMPTS[1].turns)]
    settings = BenchSettings(max_new_tokens=16, rounds=1, modes=("greedy",))
    own = state_of(loaded.model).method_state
    document = Bench([loaded], once, settings, rows=[shared, "prompt_lookup"]).run()
    drafted = {probe["row"]: probe["drafted"] for probe in calls(entry_of(document), is_watched=True)}
    assert drafted[shared] == drafted["prompt_lookup"]
    assert state_of(loaded.model).method_state is own


def test_prompts_that_do_not_fit_are_named(loaded: LoadedModel) -> None:
    long = Prompt("long", "fresh", ("a = 1\n" * 400,))
    document = Bench([loaded], [PROMPTS[0], long], ONE_ROUND, rows=["plain"]).run()
    ((what, reason),) = entry_of(document)["left_out"].items()
    assert what == "1 of 2 prompts"
    assert re.fullmatch(r"too long for the model's positions: long \(\d+ tokens\)", reason)
    with pytest.raises(ConfigError, match="positions"):
        Bench([loaded], [long], ONE_ROUND)


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 0},
        {"max_new_tokens": 0},
        {"modes": ("beam",)},
        {"modes": ()},
        {"temperature": 0.0},
        {"temperature": 1e-300},
        {"temperature": float("nan")},
    ],
)
def test_settings_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchSettings(**changes)


def test_the_random_generator_decides_nothing_that_is_compared(loaded: LoadedModel) -> None:
    torch.manual_seed(1)
    one = bench(loaded, "plain", settings=ONE_ROUND, prompts=PROMPTS[:1]).run()
    torch.manual_seed(2)
    two = bench(loaded, "plain", settings=ONE_ROUND, prompts=PROMPTS[:1]).run()
    assert untimed(entry_of(one)["records"]) == untimed(entry_of(two)["records"])
