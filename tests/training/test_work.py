"""The folder of a training: full disks, damaged files, two trainings at once, and work of another target or head."""

import copy
import dataclasses
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_specdec.errors import CheckpointError, ConfigError
from hf_specdec.methods.eagle3.checkpoint import load_head, save_head
from hf_specdec.tools.train import DraftTraining, HeadTraining, train_draft
from hf_specdec.tools.train.eagle3 import new_head
from hf_specdec.tools.train.work import held
from tests.training.conftest import PROMPTS, SETTINGS, WordNumbers

# One shard is learned from and one held out; two steps.
SHORT = HeadTraining(**{**SETTINGS, "num_texts": 16, "epochs": 1.0, "new_tokens": 8})


def train(target: LlamaForCausalLM, out: Path, prompts: list[str] = PROMPTS, **kwargs: Any) -> Any:
    tokenizer: Any = WordNumbers()
    return train_draft(target, tokenizer, prompts, out, kwargs.pop("config", SHORT), **kwargs)


@pytest.fixture(scope="module")
def finished(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(target, folder)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A finished training, to be spoiled."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a disk with so many bytes left."""
    _, hard = old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "state.pt", "model.safetensors"])
def test_a_full_disk_is_an_error_that_names_the_file_and_the_training_goes_on(
    name: str, target: LlamaForCausalLM, folder: Path, finished: Path
) -> None:
    missing = next(folder.rglob(name))
    missing.unlink()
    before = set(folder.rglob("*"))
    with no_file_above(1000), pytest.raises(OSError, match=rf"{name}' cannot be written"):
        train(target, folder)
    assert set(folder.rglob("*")) == before
    train(target, folder)
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_a_full_disk_is_an_error_of_the_folder_where_the_system_names_no_file(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    with no_file_above(100), pytest.raises(OSError, match="File too large") as caught:
        train(target, tmp_path / "out")
    assert caught.value.filename == str(tmp_path / "out")


def test_a_full_disk_leaves_the_head_that_was_there(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with no_file_above(1000), pytest.raises(OSError, match="cannot be written"):
        save_head(load_head(folder), folder)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "state.pt", "settings.json"])
def test_a_damaged_file_is_named_with_what_to_delete(name: str, target: LlamaForCausalLM, folder: Path) -> None:
    file = folder / "work" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=rf"{name}' cannot be read: .* Delete"):
        train(target, folder)


def test_two_trainings_do_not_write_to_one_folder(target: LlamaForCausalLM, folder: Path) -> None:
    with held(folder / "work"), pytest.raises(ConfigError, match="`out` must not be the folder of a training that"):
        train(target, folder)
    train(target, folder)


def test_a_folder_that_cannot_be_made_is_an_error_of_out(target: LlamaForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="`out` must be a folder that can be written"):
        train(target, tmp_path / "file")


@pytest.mark.parametrize("kind", ["target", "head", "another model"])
def test_a_model_is_not_written_over(target: LlamaForCausalLM, folder: Path, tmp_path: Path, kind: str) -> None:
    """Neither one that the training reads nor one that no training has made here."""
    place, head = tmp_path / "model", None
    target.save_pretrained(place)
    if kind == "target":
        target = LlamaForCausalLM.from_pretrained(place)
    elif kind == "head":
        place, head = folder, load_head(folder)
    before = {file: file.read_bytes() for file in place.iterdir() if file.is_file()}
    with pytest.raises(ConfigError, match="`out` must"):
        train(target, place, head=head)
    assert {file: file.read_bytes() for file in place.iterdir() if file.is_file()} == before


def test_work_of_another_kind_is_not_gone_on_with(target: LlamaForCausalLM, folder: Path) -> None:
    config, tokenizer = DraftTraining(**{**SETTINGS, "num_texts": 16, "epochs": 1.0, "new_tokens": 8}), WordNumbers()
    with pytest.raises(ConfigError, match="`kind` must be 'head' to go on with the work"):
        train_draft(target, tokenizer, PROMPTS, folder, config)  # type: ignore[arg-type]


def test_prompts_that_are_refused_do_not_bind_the_folder(target: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold at least one token"):
        train(target, tmp_path, [""])
    assert not (tmp_path / "work" / "settings.json").exists()


def test_work_of_another_target_of_the_same_shape_is_not_gone_on_with(target: LlamaForCausalLM, folder: Path) -> None:
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight += 0.1
    with pytest.raises(ConfigError, match="`weights` must be '.*' to go on with the work in"):
        train(tuned, folder)
    train(copy.deepcopy(target).bfloat16(), folder)  # the same one, loaded in another precision


def test_work_on_another_head_is_not_gone_on_with(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    head, copied = load_head(folder), shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ConfigError, match="`head` must be None to go on with the work in"):
        train(target, copied, head=head)
    other = new_head(target, (1, 2, 3), torch.ones(40), None)
    train(target, tmp_path / "other", head=head)
    with pytest.raises(ConfigError, match="`head` must be '.*' to go on with the work in"):
        train(target, tmp_path / "other", head=other)


def test_a_head_that_is_trained_on_stays_as_it_was(target: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    head = load_head(folder)
    before = copy.deepcopy(head.state_dict())
    train(target, tmp_path / "other", head=head)
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())
    assert not head.training
    assert not any(weight.requires_grad for weight in head.parameters())


def test_chains_of_another_length_are_measured_anew(target: LlamaForCausalLM, folder: Path) -> None:
    report = train(target, folder, config=dataclasses.replace(SHORT, rollout_steps=2))
    assert {len(measured.rates) for measured in report.measured} == {2}


def test_texts_that_end_at_once_are_refused(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Nothing could be measured on them."""
    ending = copy.deepcopy(target)
    ending.generation_config.eos_token_id = list(range(40))
    with pytest.raises(ConfigError, match="`prompts` must be ones after which the target writes"):
        train(ending, tmp_path, config=dataclasses.replace(SHORT, prompt_tokens=1))
