"""Tensor parallel by NCCL on two GPUs: every case of the CPU's tests, and one process's text. Run with -m gpu.

The comparison is made by the processes themselves, on a GPU each: fp32 sums of two halves round as those of one do not
always, so a text may differ where two tokens are almost equally likely.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import GRID
from tests.distributed.launch import launch
from tests.helpers.support import noisy_copy
from tests.helpers.zoo import FAMILIES, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process made of every case."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3", "mixtral"):
        model = build(FAMILIES[name])
        model.save_pretrained(folder / name)
        noisy_copy(model).save_pretrained(folder / f"{name}_draft")
    done = launch("-m", "tests.distributed.worker", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_both_processes_give_one_text(case: Any, results: list[dict[str, Any]]) -> None:
    first, second = (result[repr(case)] for result in results)
    assert first == second
    assert "error" not in first


@pytest.mark.parametrize("case", [case for case in GRID if not case[3]], ids=lambda case: "-".join(map(str, case)))
def test_every_method_gives_the_text_with_nothing_drafted(case: Any, results: list[dict[str, Any]]) -> None:
    family, _, batch, sampled, _ = case
    if family == "llama":
        nothing = repr((family, "plain", batch, sampled, "none"))
        assert results[0][repr(case)]["tokens"] == results[0][nothing]["tokens"]


@pytest.mark.parametrize("case", ["prompts that differ", "an error in the first"])
def test_a_disagreement_is_an_error_in_both(case: str, results: list[dict[str, Any]]) -> None:
    assert all("error" in result[repr(case)] for result in results)
