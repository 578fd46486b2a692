"""The page of attentions says what they do."""

from typing import Any

import pytest

from tests.helpers.zoo_wide import kinds_of
from tests.kernels.findings import MODELS, examine, listed

QUICK = ("bloom", "git", "t5")
WIDE = ("arcee", "deepseek_v32", "deepseek_v4", "gemma2", "gemma3_text", "gpt_oss", "mistral", "qwen2_vl")


def of(*names: str, marks: Any = ()) -> list[Any]:
    """The models as parameters of a test, found by name: loading every class takes ten seconds."""
    return [pytest.param(name, kind, marks=marks) for name in names for kind in kinds_of(name)]


@pytest.mark.at_most(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "kind"), [*of(*QUICK), *of(*WIDE, marks=pytest.mark.wide)])
def test_the_page_says_what_each_attention_does(model_type: str, kind: str) -> None:
    finding = examine(model_type, kind)
    assert finding.equal
    assert listed()[finding.name] == finding.key, "run python -m tests.kernels.findings"


def test_no_attention_changes_a_text() -> None:
    assert len(listed()) > 80
    assert {cells[-1] for cells in listed().values()} == {"yes"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "kind"), of(*MODELS))
def test_every_line_of_the_page(model_type: str, kind: str) -> None:
    test_the_page_says_what_each_attention_does(model_type, kind)
