"""The class for Ray Data, called as Ray calls it: plain generation's texts, from one batch for all calls."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_specdec
from hf_specdec.tools.integrations.ray import SpecTextGenerator, generate_texts
from tests.helpers.support import plain
from tests.helpers.tokenizers import save_foreign_draft

PATH = str(hf_specdec.embedded.path("target"))
PROMPTS = [f"def function_{number}(items):\n    " for number in range(6)]
OPTIONS: dict[str, Any] = {"precision": "fp32", "max_new_tokens": 8}


async def called(generator: SpecTextGenerator, rows: dict[str, Any]) -> dict[str, Any]:
    [columns] = [columns async for columns in generator(rows)]
    return columns


def expected(generator: SpecTextGenerator, prompt: str, **options: Any) -> str:
    ids = generator.tokenizer(prompt, return_tensors="pt").input_ids
    new = plain(generator.batch.model, ids, max_new_tokens=8, **options)[0, ids.shape[1] :]
    return str(generator.tokenizer.decode(new, skip_special_tokens=True))


def column(values: list[Any]) -> Any:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def test_calls_share_one_batch_and_keep_their_rows() -> None:
    """Two calls at once; every row gets its text, and rows of both are in the batch at the same time."""
    steps: list[int] = []
    generator = SpecTextGenerator(
        PATH, **OPTIONS, max_batch_size=4, do_sample=False, spec_observer=lambda step: steps.append(step.row)
    )

    async def both() -> list[dict[str, Any]]:
        halves = [{"prompt": column(half), "id": np.arange(3)} for half in (PROMPTS[:3], PROMPTS[3:])]
        return list(await asyncio.gather(*(called(generator, half) for half in halves)))

    first, second = asyncio.run(both())
    assert [*first["generated_text"], *second["generated_text"]] == [
        expected(generator, prompt, do_sample=False) for prompt in PROMPTS
    ]
    assert first["id"].tolist() == [0, 1, 2] and set(first["error"]) == {""}
    last_of_first = max(place for place, row in enumerate(steps) if row < 3)
    assert any(row >= 3 for row in steps[:last_of_first]), "rows of the second call wait for all of the first"
    generator.batch.close()


def test_no_column_of_the_dataset_is_lost() -> None:
    generator = SpecTextGenerator(PATH, **OPTIONS, do_sample=False)
    for field, name in (("text_column", "generated_text"), ("error_column", "error")):
        with pytest.raises(hf_specdec.ConfigError, match=f"`{field}` must be no column that the dataset has"):
            asyncio.run(called(generator, {"prompt": column(PROMPTS[:1]), name: column(["mine"])}))
    generator.batch.close()
    other = SpecTextGenerator(PATH, **OPTIONS, do_sample=False, text_column="critique", error_column="wrong")
    rows = {"prompt": column(PROMPTS[:1]), "error": column(["mine"]), "generated_text": column(["text"])}
    columns = asyncio.run(called(other, rows))
    assert (columns["error"].tolist(), columns["wrong"].tolist()) == (["mine"], [""])
    assert columns["critique"].tolist() == [expected(other, PROMPTS[0], do_sample=False)]
    other.batch.close()
    for size in (None, 0, "8"):
        with pytest.raises(hf_specdec.ConfigError, match="max_batch_size"):
            generate_texts(None, PATH, max_batch_size=size)


def test_a_sampled_row_draws_from_its_number() -> None:
    generator = SpecTextGenerator(PATH, **OPTIONS, do_sample=True, id_column="id", seed=100)
    rows = {"prompt": column(PROMPTS[:3]), "id": np.array([7, 2, 40])}
    found = asyncio.run(called(generator, rows))["generated_text"]
    for prompt, number, text in zip(PROMPTS, rows["id"], found, strict=False):
        torch.manual_seed(100 + int(number))
        assert text == expected(generator, prompt, do_sample=True)
    with pytest.raises(hf_specdec.ConfigError, match="whole numbers"):
        asyncio.run(called(generator, {"prompt": column(PROMPTS[:1]), "id": column(["a"])}))
    generator.batch.close()


def test_token_ids_are_prompts_and_a_wrong_row_is_told_in_its_column() -> None:
    generator = SpecTextGenerator(PATH, **OPTIONS, do_sample=False, text_column="out")
    ids = np.array(generator.tokenizer(PROMPTS[0]).input_ids)
    found = asyncio.run(called(generator, {"prompt": column([ids, np.array([0.5]), PROMPTS[1]])}))
    assert found["out"].tolist() == [
        expected(generator, PROMPTS[0], do_sample=False),
        "",
        expected(generator, PROMPTS[1], do_sample=False),
    ]
    assert [bool(error) for error in found["error"]] == [False, True, False]
    with pytest.raises(hf_specdec.ConfigError, match="The columns are text"):
        asyncio.run(called(generator, {"text": column(PROMPTS)}))
    generator.batch.close()


def test_a_draft_with_a_tokenizer_of_its_own_is_translated(tmp_path: Path) -> None:
    folder, steps = save_foreign_draft(tmp_path, PROMPTS), list[hf_specdec.SpecStep]()
    generator = SpecTextGenerator(
        PATH,
        **OPTIONS,
        do_sample=False,
        draft_model=folder,
        spec_method="draft_model",
        spec_config={"confidence_threshold": 0.0},
        spec_observer=steps.append,
    )
    found = asyncio.run(called(generator, {"prompt": column(PROMPTS[:2])}))
    assert list(found["generated_text"]) == [expected(generator, prompt, do_sample=False) for prompt in PROMPTS[:2]]
    assert "draft_model" in {node.source for step in steps for node in step.nodes}
    generator.batch.close()


def test_sampling_without_numbers_and_doubled_columns_are_refused() -> None:
    with pytest.raises(hf_specdec.ConfigError, match="`id_column` must be given where texts are sampled"):
        SpecTextGenerator(PATH, do_sample=True)
    with pytest.raises(hf_specdec.ConfigError, match="`text_column` must be a column of its own"):
        SpecTextGenerator(PATH, prompt_column="text", text_column="text")


def test_without_ray_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(hf_specdec.MissingExtraError, match=r'pip install "hf_specdec\[ray\]"'):
        generate_texts(None, PATH)
