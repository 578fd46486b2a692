"""What a training is given, next to its settings: the wrong type is named before a text is written."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_specdec.errors import ConfigError
from hf_specdec.tools.train import DFlashTraining, DraftTraining, HeadTraining, train_draft
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
def test_an_argument_of_another_type_is_named(target: LlamaForCausalLM, tmp_path: Path, field: str, value: Any) -> None:
    given = {"target": target, "tokenizer": WordNumbers(), "prompts": PROMPTS, "out": tmp_path / "out", "config": None}
    with pytest.raises(ConfigError, match=f"`{field}` must be a"):
        train_draft(**given | {field: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (HeadTraining(), "an EAGLE-3 head"),
        (DFlashTraining(), "a DFlash head that is not transformers' own"),
        (DraftTraining(), "None"),
    ],
)
def test_a_head_of_another_kind_is_named(target: LlamaForCausalLM, tmp_path: Path, config: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"`head` must be {kind}, but is 'str'"):
        train_draft(target, None, None, tmp_path, config, head="path/to/head")  # type: ignore[arg-type]
