"""The page of attentions says what they do."""

import pytest

from tests.helpers.zoo_wide import all_models
from tests.kernels.findings import MODELS, examine, listed

QUICK = (
    "arcee",
    "bloom",
    "deepseek_v32",
    "deepseek_v4",
    "git",
    "gemma2",
    "gpt_oss",
    "gemma3_text",
    "mistral",
    "qwen2_vl",
    "t5",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "kind"), [pair for pair in all_models() if pair[0] in QUICK])
def test_the_page_says_what_each_attention_does(model_type: str, kind: str) -> None:
    finding = examine(model_type, kind)
    assert finding.equal
    assert listed()[finding.name] == finding.key, "run python -m tests.kernels.findings"


def test_no_attention_changes_a_text() -> None:
    assert len(listed()) > 80
    assert {cells[-1] for cells in listed().values()} == {"yes"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "kind"), [pair for pair in all_models() if pair[0] in MODELS])
def test_every_line_of_the_page(model_type: str, kind: str) -> None:
    test_the_page_says_what_each_attention_does(model_type, kind)
