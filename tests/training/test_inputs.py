"""What both trainings are given, next to their settings: the wrong type is named before a text is written."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_specdec.errors import ConfigError
from hf_specdec.tools.train import DraftTraining, HeadTraining, train_draft, train_head
from tests.training.conftest import PROMPTS, WordNumbers

WRONG: list[tuple[str, Any]] = [
    ("target", "path/to/target"),
    ("tokenizer", "path/to/target"),
    ("tokenizer", None),
    ("prompts", "1 2 3"),
    ("prompts", Path("prompts.txt")),
    ("prompts", [1, 2]),
    ("config", {"num_texts": 128}),
    ("config", {}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
@pytest.mark.parametrize("train", [train_head, train_draft])
def test_an_argument_of_another_type_is_named(
    train: Any, target: LlamaForCausalLM, tmp_path: Path, field: str, value: Any
) -> None:
    given = {"target": target, "tokenizer": WordNumbers(), "prompts": PROMPTS, "out": tmp_path / "out", "config": None}
    with pytest.raises(ConfigError, match=f"`{field}` must be a"):
        train(**given | {field: value})
    assert not (tmp_path / "out").exists()


def test_the_settings_of_another_training_are_named(target: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`config` must be a HeadTraining"):
        train_head(target, None, None, tmp_path, DraftTraining())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`config` must be a DraftTraining"):
        train_draft(target, None, None, tmp_path, HeadTraining())  # type: ignore[arg-type]


def test_a_head_that_is_none_is_named(target: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`head` must be an EAGLE-3 head, but is 'str'"):
        train_head(target, None, None, tmp_path, head="path/to/head")  # type: ignore[arg-type]
