"""`SpecMemory` in a file: what is loaded drafts what was saved, a damaged file is an error, saving harms no one."""

import json
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec import AutoSpecConfig, ConfigError, DraftTree, SpecMemory
from hf_specdec.methods.auto.drafter import AutoDrafter
from tests.helpers.drafts import drafted_by, learned

VOCAB = 40


def text(seed: int, length: int = 60) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(memory: SpecMemory, tokens: list[int], *, is_sampled: bool = False, prompt: int = 12) -> list[DraftTree]:
    """Draft along a text that is known, with random logits that like the true tokens; returns the trees."""
    drafter = AutoDrafter(AutoSpecConfig(num_nodes=12), memory, is_sampled=is_sampled)
    drafter.begin(tokens[:prompt])
    trees, place = [], prompt
    generator = torch.Generator().manual_seed(len(tokens))
    while place < len(tokens):
        tree = drafted_by(drafter, 12)
        trees.append(tree)
        logits = torch.randn(len(tree), VOCAB, generator=generator)
        node, accepted = 0, [tokens[place]]
        while (following := tree.child(node, accepted[-1])) is not None and place + len(accepted) < len(tokens):
            node = following
            accepted.append(tokens[place + len(accepted)])
        logits[:, tokens[place]] += 4.0
        learned(drafter, tree, logits, accepted)
        place += len(accepted)
    drafter.end()
    return trees


def trained(**bounds: int) -> SpecMemory:
    """A memory of some texts, greedy and sampled ones, with a draft model's gains."""
    memory = SpecMemory(**bounds)
    for seed in range(6):
        decode(memory, text(seed) + text(seed)[:30], is_sampled=seed % 2 == 1)
    memory.greedy.gained(0, 1.5)
    memory.greedy.gained(1, 0.25)
    return memory


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_loaded_memory_drafts_what_the_saved_one_would(tmp_path: Path, is_sampled: bool) -> None:
    memory = trained(max_tokens=900, max_entries=600)
    assert all(map(len, memory.pool.generations()))
    assert len(memory.recycled) > 500
    memory.save(tmp_path / "memory")
    loaded = SpecMemory.load(tmp_path / "memory")
    assert loaded.bounds == memory.bounds == (900, 600)
    assert loaded.greedy.gains == memory.greedy.gains
    for seed in (3, 4, 99, 3):  # known texts and one that is new; what both learn on the way counts too
        ours = decode(loaded, text(seed, 80), is_sampled=is_sampled)
        expected = decode(memory, text(seed, 80), is_sampled=is_sampled)
        assert [(tree.tokens, tree.parents, tree.probabilities) for tree in ours] == [
            (tree.tokens, tree.parents, tree.probabilities) for tree in expected
        ]
    fresh = decode(SpecMemory(900, 600), text(3, 80), is_sampled=is_sampled)
    assert [tree.tokens for tree in fresh] != [tree.tokens for tree in expected]


def damaged(path: Path, change: Any) -> Path:
    """The file with one tensor changed or taken out."""
    tensors = load_file(path)
    with path.open("rb") as file:
        metadata = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))["__metadata__"]
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


CHANGES: dict[str, Any] = {
    "missing tensor": lambda tensors, facts: tensors.pop("greedy.seen"),
    "other shape": lambda tensors, facts: tensors.update({"greedy.weights": torch.zeros(2, 2, dtype=torch.float64)}),
    "other type": lambda tensors, facts: tensors.update({"sampled.gains": torch.zeros(2)}),
    "no number": lambda tensors, facts: tensors["greedy.weights"].fill_(float("nan")),
    "place out of range": lambda tensors, facts: tensors["recycled.places"].add_(10**6),
    "evidence out of range": lambda tensors, facts: tensors["recycled.evidence"].fill_(float("inf")),
    "no token": lambda tensors, facts: tensors["texts.young"].sub_(1),
    "no bound": lambda tensors, facts: facts.pop("max_entries"),
    "odd bound": lambda tensors, facts: facts.update(max_entries="many"),
    "other format": lambda tensors, facts: facts.update(format="hf_specdec memory 0"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a memory's file holds."""
    path = tmp_path_factory.mktemp("saved") / "memory"
    trained(max_tokens=900, max_entries=600).save(path)
    return path.read_bytes()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, saved: bytes, change: Any) -> None:
    path = tmp_path / "memory"
    path.write_bytes(saved)
    SpecMemory.load(damaged(path, lambda tensors, facts: None))
    with pytest.raises(ConfigError) as error:
        SpecMemory.load(damaged(path, change))
    assert error.value.field == "spec_memory"
    assert error.value.rule.startswith("must be")
    assert error.value.value == str(path)
    assert "SpecMemory" in error.value.remedy


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all", "cut"], ids=["none", "empty", "text", "cut"])
def test_what_is_no_such_file_is_an_error(tmp_path: Path, saved: bytes, content: bytes | str | None) -> None:
    path = tmp_path / "memory"
    if content == "cut":
        content = saved[:-100]
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="spec_memory"):
        SpecMemory.load(path)


def test_a_save_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"
    trained(max_tokens=900).save(path)
    before = path.read_bytes()

    write = Path.write_bytes

    def cut(file: Path, content: bytes) -> int:
        write(file, content[:100])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", cut)
    with pytest.raises(OSError, match="disk full"):
        SpecMemory().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("bounds", [(0, 5), (5, 0), (2.5, 5), (True, 5), (10**30, 5), (5, 10**30)])
def test_a_bound_below_one_or_beyond_memory_is_an_error(bounds: Any) -> None:
    with pytest.raises(ConfigError, match="max_tokens|max_entries"):
        SpecMemory(*bounds)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        SpecMemory(10, 20).save(tmp_path / "missing" / "memory")
    assert error.value.filename.startswith(str(tmp_path / "missing"))


def test_threads_share_a_memory_while_it_is_saved(tmp_path: Path) -> None:
    """Every file written meanwhile loads, and no thread stumbles."""
    memory = SpecMemory(max_tokens=2_000, max_entries=900)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for seed in range(6):
                decode(memory, text(10 * number + seed), is_sampled=number == 2)
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            memory.save(tmp_path / "memory")
            SpecMemory.load(tmp_path / "memory")
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert len(memory.pool) <= 2_000
    assert len(memory.recycled) <= 900 + 3 * 3  # a thread in the midst of a step may add its three keys
    assert sum(memory.greedy.seen) > sum(memory.sampled.seen) > 0
