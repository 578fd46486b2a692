"""The precision benchmark: a row for each precision, whose figures are those of what is loaded."""

from typing import Any

import pytest
import torch

from hf_specdec import embedded
from hf_specdec.errors import CheckpointError
from hf_specdec.tools.bench import precisions
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.precisions import compare_tokens, measure_precisions, step_seconds
from hf_specdec.tools.bench.prompts import Prompt, default_prompts
from hf_specdec.tools.bench.tables import markdown

PROMPTS = [Prompt("copy", "code", ("a = 1\nb = 2\na = 1\nb =",)), Prompt("new", "code", ("def f(x):\n",))]


@pytest.mark.wide
def test_each_precision_has_its_row() -> None:
    """fp32, which logits are set against, and bf16, which bytes and seconds are, are always among them."""
    path, prompts = embedded.path("draft"), default_prompts()[:2]
    document = measure_precisions(["fp8"], prompts, ["prompt_lookup"], path=path, max_new_tokens=6, rounds=2)
    rows = {row["precision"]: row for row in document["tables"][0]["rows"]}
    assert list(rows) == ["fp32", "bf16", "fp8"]
    assert rows["fp8"]["weights_mb"] < rows["bf16"]["weights_mb"] < rows["fp32"]["weights_mb"]
    assert rows["bf16"]["over_bf16_1"] == rows["bf16"]["by_cpu_time_8"] == rows["bf16"]["weights_over_bf16"] == 1
    assert rows["fp32"]["mean_kl"] == 0 < rows["fp8"]["mean_kl"]
    expected = {"method": "prompt_lookup", "num_equal": 2, "num_prompts": 2, "match_rate": 1.0}
    assert rows["fp32"]["tokens"] == [expected]
    assert "| fp8 |" in markdown(document) and "equal, prompt_lookup" in markdown(document)


def test_a_model_without_a_reference_is_an_error() -> None:
    """Other precisions have a row with their error; without fp32 and bf16 there is nothing to set them against."""
    with pytest.raises(CheckpointError, match="no-such-folder"):
        measure_precisions(["fp8"], PROMPTS, ["prompt_lookup"], path="./no-such-folder")


def test_every_precision_is_loaded_on_the_device_that_is_asked_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[Any] = []

    def load(path: Any, **options: Any) -> LoadedModel:
        devices.append(str(options["device"]))
        return loaded

    monkeypatch.setattr(precisions, "load_model", load)
    measure_precisions(["fp8"], PROMPTS, ["prompt_lookup"], device=torch.device("cpu"), max_new_tokens=2, rounds=1)
    assert devices == ["cpu"] * 3


def test_a_widened_model_is_quantised_at_its_size() -> None:
    loaded = load_model(None, dtype="fp8", device="cpu", widen_to=(512, 7))
    assert loaded.model.model.layers[6].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    assert loaded.label == "embedded target, 512x7"
    text = loaded.tokenizer("def read(path):\n", return_tensors="pt").input_ids
    with torch.no_grad():
        assert loaded.model(text).logits.isfinite().all()


def test_a_method_that_parts_from_plain_is_counted(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of two, from the third token on."""
    (equal,) = compare_tokens(loaded, PROMPTS, ["prompt_lookup"], 8)
    assert (equal["num_equal"], equal["match_rate"]) == (2, 1.0)
    own = loaded.model.generate
    first = loaded.tokenizer(PROMPTS[0].turns[0], return_tensors="pt").input_ids

    def wrong(**kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = own(**kwargs).clone()
        if torch.equal(kwargs["input_ids"], first):
            output[0, first.shape[1] + 2] += 1
        return output

    monkeypatch.setitem(loaded.model.__dict__, "generate", wrong)
    (found,) = compare_tokens(loaded, PROMPTS, ["prompt_lookup"], 8)
    assert (found["num_equal"], found["match_rate"]) == (1, 10 / 16)


def test_steps_leave_the_context_as_it_was(loaded: LoadedModel) -> None:
    taken = step_seconds({"a": loaded.model, "b": loaded.model}, torch.arange(40)[None], 4, rounds=3)
    assert taken.keys() == {"a", "b"}
    assert all(clock > 0 and processor > 0 for clock, processor in taken.values())
