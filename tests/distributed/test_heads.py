"""Tensor parallel with a draft head: two processes give one process's text, step for step."""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
from tests.distributed.head_worker import CASES, head_arguments, target_of
from tests.distributed.launch import launch
from tests.distributed.worker import outcome
from tests.helpers.mtp import build_target
from tests.helpers.zoo import FAMILIES, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    build(FAMILIES["llama"]).save_pretrained(folder / "llama")
    build_target("glm4_moe, 1 layer").save_pretrained(folder / "glm")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    done = launch("-m", "tests.distributed.head_worker", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_a_head_give_one_process_s_text(case: str, results: list[Any], folder: Path) -> None:
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(folder / target_of(case))
    expected = outcome(model, 0, head_arguments(case, model))
    assert expected["steps"][1] > 0
    for result in results:
        assert {**result[case], "heads": None} == {**expected, "heads": None}
