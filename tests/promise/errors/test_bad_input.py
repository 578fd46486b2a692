"""Bad input is answered with field, rule, value and remedy, before anything is computed; the model stays usable."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, BertConfig, BertModel, GenerationConfig

import hf_specdec
from hf_specdec import CheckpointError, SpecError, UnsupportedModelError
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE, build

LOOKUP = {"spec_method": "prompt_lookup", "do_sample": False}


@pytest.fixture(scope="module")
def expected_ids(zoo: Callable[[str], Any]) -> list[list[int]]:
    """Plain generation's text before any bad input."""
    ids: list[list[int]] = plain(zoo("llama"), PROMPT, max_new_tokens=4, do_sample=False).tolist()
    return ids


@pytest.fixture(autouse=True)
def model_stays_usable(zoo: Callable[[str], Any], expected_ids: list[list[int]]) -> Iterator[None]:
    """After each test the model generates as before."""
    yield
    model, expected = zoo("llama"), expected_ids
    assert model.generate(PROMPT, max_new_tokens=4, **LOOKUP).tolist() == expected
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False).tolist() == expected


@pytest.mark.parametrize("setting", [{"max_new_tokens": 0}, {"max_new_tokens": -4}, {"max_length": 5}])
def test_lengths_that_leave_no_room_fail_as_in_plain_decoding(model: Any, setting: dict[str, int]) -> None:
    with pytest.raises(ValueError) as expected:
        plain(model, PROMPT, do_sample=False, **setting)
    with pytest.raises(ValueError) as error:
        model.generate(PROMPT, **LOOKUP, **setting)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_lengths_may_be_tensors_and_numpys_numbers(model: Any, cache: str) -> None:
    lengths = {"max_length": torch.tensor([34, 36]).max(), "min_new_tokens": np.int32(2), "cache_implementation": cache}
    expected = plain(model, PROMPT, do_sample=False, **lengths)
    assert model.generate(PROMPT, **LOOKUP, **lengths).equal(expected)
    config = GenerationConfig(do_sample=False, **lengths)
    assert model.generate(PROMPT, **LOOKUP, generation_config=config).equal(expected)


@pytest.mark.parametrize("by", ["position", "inputs", "input_ids"])
@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros(1, 0, dtype=torch.long), ["input_ids", "at least one token"]),
        (torch.tensor([[5, VOCAB_SIZE]]), ["input_ids", f"{VOCAB_SIZE}", "tokenizer"]),
        (torch.tensor([[5, VOCAB_SIZE + 1000]]), ["input_ids", f"{VOCAB_SIZE + 1000}"]),
        (torch.tensor([[5, -100, 6]]), ["input_ids", "-100"]),
        (torch.tensor([5, 6]), ["input_ids", "(batch, length)", "(2,)"]),
        ([[5, 6]], ["input_ids", "must be a tensor", "list"]),
        (torch.tensor([[5.0, 6.0]]), ["input_ids", "torch.int64", "torch.float32"]),
        (torch.tensor([[True, True]]), ["input_ids", "torch.int64", "torch.bool"]),
        ("def f():", ["input_ids", "must be a tensor", "str", "tokenizer(text"]),
        (BatchEncoding({"input_ids": torch.tensor([[5, 6]])}), ["must be a tensor", "BatchEncoding", "generate(**"]),
    ],
    ids="empty,vocab_size,beyond,negative,one row,list,floats,booleans,text,tokenizer's output".split(","),
)
def test_prompts_the_model_cannot_read(model: Any, by: str, ids: Any, words: list[str]) -> None:
    args: tuple[Any, ...] = (ids,) if by == "position" else ()
    kwargs: dict[str, Any] = {"position": {}, "inputs": {by: ids}, "input_ids": {"inputs": None, by: ids}}[by]
    with pytest.raises(SpecError) as error:
        model.generate(*args, **kwargs, max_new_tokens=4, **LOOKUP)
    for word in words:
        assert word in str(error.value)


def test_a_model_that_torch_has_wrapped_is_to_be_unwrapped(model: Any) -> None:
    """Wrapped without its `__init__`, which would move the model to a device that another test has emulated."""
    wrapped: Any = torch.nn.DataParallel.__new__(torch.nn.DataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = model
    with pytest.raises(UnsupportedModelError, match=r"DataParallel.*model\.module"):
        hf_specdec.enable(wrapped)


@pytest.mark.parametrize(
    "thing",
    [
        BertModel(
            BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=16)
        ),
        torch.nn.Linear(2, 2),
        "gpt2",
        None,
    ],
    ids=["BertModel", "Linear", "str", "None"],
)
@pytest.mark.parametrize("verb", [hf_specdec.enable, hf_specdec.capability])
def test_things_that_do_not_generate(thing: Any, verb: Callable[[Any], Any]) -> None:
    """Named by their type, with what to load instead."""
    with pytest.raises(UnsupportedModelError, match=f"`model` must be .*{type(thing).__name__}.*AutoModelForCausalLM"):
        verb(thing)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(FAMILIES["llama"]).save_pretrained(tmp_path)
    return tmp_path


def load(path: Any) -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("name", ["missing", "missing/deeper"])
def test_a_missing_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        load(tmp_path / name)
    with pytest.raises(CheckpointError, match="missing"):
        load(str(tmp_path / name))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        load(tmp_path)


def test_a_file_where_a_folder_should_be(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        load(folder / "model.safetensors")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=folder.name):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -8])
def test_truncated_weights(folder: Path, keep: int) -> None:
    """Cut off anywhere: before, in and after the header."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=folder.name):
        load(folder)


DAMAGED = [
    "",
    "{",
    "[]",
    "{}",
    "[" * 100_000,
    '{"model_type": "no such model"}',
    '{"model_type": ["llama"]}',
    '{"model_type": "llama", "hidden_size": "x"}',
    '{"model_type": "llama", "dtype": "banana"}',
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=folder.name):
        load(folder)
    with pytest.raises(hf_specdec.SpecError, match=r"config\.json|model_type|draft head|EAGLE"):
        hf_specdec.AutoDraftHead.from_pretrained(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    build(FAMILIES["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=tmp_path.name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("loader", "family", "message"),
    [
        ("AutoModelForCausalLM", "t5", "`model` must be one that AutoModelForCausalLM loads, .* AutoModelForSeq2SeqLM"),
        ("AutoModelForSeq2SeqLM", "llama", "`model` must be one that AutoModelForSeq2SeqLM loads, .* Choose another"),
    ],
)
def test_a_model_of_another_kind_is_named(tmp_path: Path, loader: str, family: str, message: str) -> None:
    """transformers lists all models that the class loads, more than two hundred."""
    build(FAMILIES[family]).save_pretrained(tmp_path)
    with pytest.raises(hf_specdec.ConfigError, match=message) as caught:
        getattr(hf_specdec, loader).from_pretrained(tmp_path)
    assert len(str(caught.value)) < 400
