"""Tensor parallel: two processes give one process's text, whatever differs between them; what cannot be is an error."""

import json
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch

import hf_specdec
from tests.distributed import forked
from tests.distributed.cases import GRID, HEADS, ODD, arguments, seed_of
from tests.distributed.worker import many, outcome, stopped, turns
from tests.helpers.mtp import build_target
from tests.helpers.support import noisy_copy
from tests.helpers.zoo import FAMILIES, build

# Trees, drafts of both kinds, rows, samples, and experts; the odd cases are prompt lookup's.
QUICK = (
    ("llama", "use_logits", 1, True, "shared"),
    ("llama", "auto", 1, False, "none"),
    ("mixtral", "draft_model", 3, True, "shared"),
)
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Checkpoints of the families of the cases whose tests run, and their drafts."""
    folder = tmp_path_factory.mktemp("models")
    for name in {"llama", *(case[0] for case in cases_of(request))}:
        model = build_target("glm4_moe, 1 layer") if name == "glm" else build(FAMILIES[name])
        model.save_pretrained(folder / name)
        noisy_copy(model).save_pretrained(folder / f"{name}_draft")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> Results:
    """What each of the two processes made of every case whose test runs."""
    (folder / "cases.json").write_text(json.dumps([*cases_of(request), *ODD]))
    assert forked.main("tests.distributed.worker", folder) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """The same in this process, by the first process's seed and arguments."""

    def run(case: Any) -> dict[str, Any]:
        family, draft = ("llama", "none") if isinstance(case, str) else (case[0], case[-1])
        kwargs = arguments(case, 0)
        load = hf_specdec.AutoModelForCausalLM.from_pretrained
        model = load(folder / family)
        if draft == "head":
            kwargs["assistant_model"] = HEADS[case[1]](model)
        elif draft != "none":
            kwargs["assistant_model"] = load(folder / f"{family}_draft")
        return outcome(model, 0, kwargs)

    return run


def cases_of(request: pytest.FixtureRequest) -> list[Any]:
    """The cases of the grid whose tests run."""
    running = {tuple(item.callspec.params.values()) for item in request.session.items if is_of_grid(item)}
    return [case for case in GRID if case in running]


def is_of_grid(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return (
        isinstance(item, pytest.Function) and item.originalname == test_two_processes_give_one_process_s_text.__name__
    )


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("family", "method", "batch", "sampled", "place"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.wide) for case in GRID],
)
def test_two_processes_give_one_process_s_text(
    family: str, method: str, batch: int, sampled: bool, place: str, results: Results, alone: Any
) -> None:
    """Tokens, steps and the random state afterwards, though every process had a seed of its own."""
    case = (family, method, batch, sampled, place)
    expected = alone(case)
    untimed = {"heads": None} | ({"steps": None} if method == "auto" else {})  # which drafts as much as pays
    for result in results:
        ours = result[repr(case)]
        assert {**ours, **untimed} == {**expected, **untimed}
        assert ours["steps"] == results[0][repr(case)]["steps"]
        assert ours["heads"] * 2 == expected["heads"], "each process keeps the keys of its own heads"


@pytest.mark.parametrize(
    "case",
    [
        "drafters that differ",
        "clocks that differ",
        "noise that differs",
        "plain with clocks",
        "an error in the second, which no one asks",
    ],
)
def test_the_first_process_decides(case: str, results: Results, alone: Any) -> None:
    """Drafts, stops and scores may depend on a process; all follow the first one."""
    expected = alone(case)
    for result in results:
        assert {**result[repr(case)], "heads": None} == {**expected, "heads": None}


@pytest.mark.parametrize(
    ("case", "rank", "named"),
    [
        ("prompts that differ", None, "input_ids"),
        ("lengths that differ", None, "input_ids"),
        ("methods that differ", None, "spec_method"),
        ("an error in the first", 0, "LookupError: no such word"),
        ("an error in an observer", 1, "KeyError: 'observer'"),
    ],
)
def test_a_disagreement_or_error_of_one_process_ends_all(
    case: str, rank: int | None, named: str, results: Results
) -> None:
    message = named if rank is None else f"rank {rank}: {named}"
    for result in results:
        error = result[repr(case)]["error"]
        assert error == named or (error.startswith("RankError: ") and message in error)


def test_after_errors_the_model_works_as_before(results: Results, alone: Any) -> None:
    expected = alone("all is well again")
    for result in results:
        assert result[repr("all is well again")]["tokens"] == expected["tokens"]


def test_many_prompts(results: Results, folder: Path) -> None:
    """Each prompt by itself, the seeds drawn by the first process."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(folder / "llama")
    expected = json.loads(json.dumps(many(model, 0)))
    assert [result["many"] for result in results] == [expected, expected]
    assert sum(not is_good for _, _, is_good, _ in expected) == 2
    torch.manual_seed(seed_of(1))
    assert many(model, 1) != expected, "other seeds would have shown"


@pytest.mark.parametrize("work", [stopped, turns])
def test_a_job_left_early_and_a_second_turn_are_one_process_s(work: Any, results: Results, folder: Path) -> None:
    """Nobody is left waiting; each process keeps its own heads of the cache."""
    expected = work(hf_specdec.AutoModelForCausalLM.from_pretrained(folder / "llama"))
    assert [result[work.__name__] for result in results] == [expected, expected]


def test_models_that_several_processes_share_are_not_moved_or_mixed(results: Results) -> None:
    assert [result["refused"] for result in results] == [["device_list", "assistant_model"]] * 2
