"""The compiled core against the same functions in Python: the same bytes in the same arrays, node for node."""

import importlib.util
import logging
import random
import runpy
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import AutoSpecConfig, SpecMemory
from hf_specdec.common.tree import ANY_DEPTH, DraftTree
from hf_specdec.kernels import native
from hf_specdec.kernels.native.sources import sources_number
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.auto.recycled_logits import NUM_KEPT, RecycledLogits
from hf_specdec.methods.auto.search import Likeliest, Search, Sources
from hf_specdec.methods.common import node_logits
from hf_specdec.methods.common.ngrams import NUM_COMMON, NgramIndex, TopCounts
from hf_specdec.methods.common.node_logits import NodeLogits, read_logits
from tests.helpers.drafts import TableScorer, drafted_by, learned, random_table
from tests.native import recycled
from tests.native.conftest import ROOT
from tests.native.oracle import PythonSearch

OFTEN = settings(max_examples=60, deadline=None, derandomize=True, database=None)
TEXTS = st.lists(st.integers(0, 6), min_size=1, max_size=50)
VOCAB = 12


@pytest.fixture(autouse=True)
def installed_core() -> Iterator[None]:
    """Whatever a test uses, the one that was there comes back."""
    before = native.core
    yield
    native.core = before


def indexed(core: Any, pieces: Sequence[Sequence[int]]) -> NgramIndex:
    native.core = core
    index = NgramIndex(4)
    for piece in pieces:
        index.extend(piece)
    return index


@OFTEN
@given(pieces=st.lists(st.lists(st.integers(-1, 9), max_size=40), max_size=6), ngram=TEXTS, limit=st.integers(0, 20))
def test_an_index_finds_the_same_places(core: Any, pieces: list[list[int]], ngram: list[int], limit: int) -> None:
    ours, theirs = indexed(core, pieces), indexed(None, pieces)
    assert ours.tokens == theirs.tokens
    counts = TopCounts(NUM_COMMON)
    for _, token in dict.fromkeys(pairwise(ours.tokens)):
        if token >= 0:
            counts.add(token)
    assert ours.common.arrays == counts.arrays
    for size in range(1, 5):
        native.core = core
        result = ours.places(ngram[:size], limit)
        native.core = None
        assert result == theirs.places(ngram[:size], limit)


def rows(rng: random.Random, count: int) -> tuple[Any, Any]:
    """Next tokens and their log probabilities for so many nodes, as a forward would bring them."""
    width = rng.choice([3, 8, NUM_KEPT])
    tokens = [rng.sample(range(20), width) for _ in range(count)]
    log_probs = [sorted((-9 * rng.random() for _ in range(width)), reverse=True) for _ in range(count)]
    return np.array(tokens, dtype=np.int64), np.array(log_probs, dtype=np.float32)


def accepted_of(rng: random.Random, tree: DraftTree) -> list[int]:
    """A branch of the tree and a token after it."""
    branch = [tree.tokens[node] for node in tree.path(rng.randrange(len(tree)))[1:]]
    return [*branch, rng.randrange(8)]


def noise_of(rng: random.Random) -> list[Any]:
    """Of the draws after some levels; not every token has some, and some have hardly any."""
    widths = [rng.choice([5, 20]) for _ in range(rng.randrange(4))]
    return [np.array([rng.choice([rng.random(), 0.0]) for _ in range(width)], dtype=np.float32) for width in widths]


def steps(search_of: Any, text: Sequence[int], earlier: Sequence[Sequence[int]], seed: int, takes_trees: bool) -> Any:
    """All that a few steps find and learn, by the core's search or by the oracle's."""
    put_nodes = RecycledLogits.put_nodes if search_of is Search else recycled.put_nodes
    rng, seen = random.Random(seed), list[Any]()
    memory, index = SpecMemory(300, 100), NgramIndex(4)
    for item in earlier:
        memory.pool.add(item)
    sources = Sources(memory, is_sampled=False)
    index.extend(text)
    for _ in range(5):
        depth = rng.choice([ANY_DEPTH, 0, 1, 3])
        search = search_of(sources, index, takes_trees=takes_trees, max_depth=depth, noise=noise_of(rng))
        result = search.likeliest(rng.choice([1, 6, 24]), rng.choice([1e-3, 2e-2]))
        assert max(result.depths) <= depth
        seen.append(result)
        if rng.random() < 0.4:
            search.score(rng.choice(result.nodes), ([1, 2, 3], [9.0, 5.0, 3.0]))
            result = search.likeliest(12, 1e-3)
            seen += [search.value(result.nodes), result]
        tree = DraftTree.of_nodes(result.tokens, result.parents, result.depths, result.probabilities)
        accepted, node = accepted_of(rng, tree), 0
        for token in accepted:
            seen += [search.votes(node, token), search.token(node), search.parent(node), search.probability(node)]
            node = search.child(node, token)
            if node < 0:
                break
        verified = tree.truncated(max_nodes=rng.choice([2, 8, 40]))
        search.follow(verified, accepted)
        best, log_probs = rows(rng, len(result.tokens))
        before = index.tokens[-3:-1]
        put_nodes(memory.recycled, result.tokens, result.parents, before, best, log_probs)
        index.extend(accepted)
    learned = memory.greedy
    kept = {name: row.tolist() for name, row in memory.recycled.export().items()}
    return [*seen, *map(list, learned.arrays), sources.trust, kept]


@OFTEN
@given(text=TEXTS, earlier=st.lists(TEXTS, max_size=3), seed=st.integers(0, 999), takes_trees=st.booleans())
def test_a_search_finds_the_same_nodes_and_learns_the_same(
    core: Any, text: list[int], earlier: list[list[int]], seed: int, takes_trees: bool
) -> None:
    """Numbers are compared as they are: not one rounding apart."""
    native.core = core
    ours = steps(Search, text, earlier, seed, takes_trees)
    assert ours == steps(PythonSearch, text, earlier, seed, takes_trees)
    assert any(isinstance(item, Likeliest) for item in ours)


@pytest.mark.parametrize("scored", [None, True, False], ids=["alone", "trees scored", "chains scored"])
def test_a_drafter_proposes_the_same_trees(core: Any, scored: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities are torch's for both: the core sums in another order."""
    monkeypatch.setattr(node_logits, "_read_on_host", lambda logits, num_top: None)
    table = random_table(seed=1, vocab_size=VOCAB, scale=3.0)

    def trees(which: Any) -> list[Any]:
        monkeypatch.setattr("hf_specdec.methods.auto.drafter.Search", which)
        if which is PythonSearch:
            monkeypatch.setattr(RecycledLogits, "put_nodes", recycled.put_nodes)
        memory, result = SpecMemory(2_000, 2_000), []
        for start in range(3):
            scorer = None if scored is None else TableScorer(table, vocab_size=VOCAB, takes_trees=scored)
            drafter, text = AutoDrafter(AutoSpecConfig(), memory, scorer=scorer), [start, start + 1]
            drafter.begin(text)
            for _ in range(12):
                tree = drafted_by(drafter, 16)
                logits = torch.stack(
                    [table((*text[:-1], *[tree.tokens[n] for n in tree.path(node)])) for node in range(len(tree))]
                )
                accepted = [int(table(tuple(text)).argmax())]
                learned(drafter, tree, logits, accepted)
                text += accepted
                result.append((tree.tokens, tree.parents, tree.depths, tree.probabilities, drafter.describe(tree)))
            drafter.end()
        return result

    native.core = core
    assert trees(Search) == trees(PythonSearch)


def test_a_text_takes_few_bytes_a_token(core: Any) -> None:
    index = indexed(core, [random.Random(0).choices(range(500), k=40_000)])
    tokens, older, slots, _ = index.arrays
    assert sum(part.itemsize * len(part) for part in (tokens, older, slots)) < 60 * len(index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "count"), [(8, 8), (63, 1), (64, 8), (1_000, 8), (1_000, 40), (70_000, 8)])
def test_what_is_read_of_logits_is_a_stable_sorts(core: Any, dtype: torch.dtype, width: int, count: int) -> None:
    """Of equal logits, of which bf16 has many, the first token comes first; the normaliser is not rounded to bf16."""
    native.core = core
    generator = torch.Generator().manual_seed(width + count)
    logits = (5.0 * torch.randn((2, 3, width), generator=generator)).to(dtype)
    logits[0, 0, : width // 3] = -torch.inf
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    held = logits.view(torch.int16 if dtype == torch.bfloat16 else dtype).numpy()
    read = np.empty((2, 3, 1 + 2 * count), dtype=np.float32)
    is_whole = width - width // 3 >= count
    assert core.read_logits(held, read, width, count) == is_whole
    if is_whole:
        assert np.array_equal(read, read_logits(logits, count))
        assert np.array_equal(read[..., : 1 + count], np.concatenate([tokens[..., :1], tokens[..., :count]], axis=-1))
        log_probs = ordered[..., :count] - logits.double().logsumexp(dim=-1, keepdim=True)
        np.testing.assert_allclose(read[..., 1 + count :], log_probs.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_no_logits_are_left_to_torch(core: Any, odd: float) -> None:
    native.core = core
    for place in (0, 77, 99):
        logits = torch.full((2, 100), float("-inf")) if odd == float("-inf") else torch.randn(2, 100)
        logits[1, place] = 1.0 if odd == float("-inf") else odd
        ours = NodeLogits(logits, read_logits(logits, 3)).best()
        assert not core.read_logits(logits.numpy(), np.empty((2, 7), dtype=np.float32), 100, 3)
        native.core = None
        assert ours == NodeLogits(logits).best() == logits.argmax(-1).tolist()
        native.core = core


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_core_of_other_sources_is_not_used(
    core: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_stale: bool
) -> None:
    assert sources_number(ROOT / "hf_specdec" / "kernels" / "native") == core.SOURCES
    monkeypatch.setitem(sys.modules, "hf_specdec.kernels.native._core", core)
    monkeypatch.setattr(native, "_core", core, raising=False)
    if is_stale:
        monkeypatch.setattr(core, "SOURCES", 0)
    source = importlib.util.find_spec("hf_specdec.kernels.native")
    assert source is not None
    again = importlib.util.module_from_spec(source)
    assert source.loader is not None
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        source.loader.exec_module(again)
    assert (again.core is None) == is_stale == ("Install hf_specdec again" in caplog.text)


def test_the_number_of_the_sources_changes_with_any_of_them(tmp_path: Path) -> None:
    assert sources_number(tmp_path) is None
    (tmp_path / "core.h").write_text("int a;")
    (tmp_path / "module.c").write_text("int b;")
    before = sources_number(tmp_path)
    (tmp_path / "core.h").write_text("long a;")
    assert sources_number(tmp_path) not in (None, before)


def test_none_is_returned_with_a_reference_whatever_python_built_the_core() -> None:
    """One library serves all versions, and with the headers of 3.12 the macro counts no reference for 3.11 either."""
    sources = {file.name: file.read_text() for file in Path(native.__file__).parent.glob("*.c")}
    assert sources
    assert not [name for name, text in sources.items() if "Py_RETURN_" in text]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is immortal, references to it are not counted")
def test_calls_of_the_core_keep_the_references_to_none(core: Any) -> None:
    weights = torch.ones(8)
    before = sys.getrefcount(None)
    for _ in range(100):
        core.rms_norm(*[weights.data_ptr()] * 3, 1, 8, 1e-6, 0)
    assert sys.getrefcount(None) > before - 50


def test_arrays_that_do_not_fit_are_refused(core: Any) -> None:
    tokens, older, slots = array("i", [1, 2, 3]), array("i", [0] * 12), array("i", [0] * 64)
    assert core.link(tokens, older, slots, 4, 0) == (6, [2, 3])
    with pytest.raises(ValueError, match="power of two"):
        core.places(tokens, older, array("i", [0] * 3), 4, (1,), 8)
    with pytest.raises(ValueError, match="a link for each token"):
        core.link(tokens, older[:5], slots, 4, 0)
    with pytest.raises(ValueError, match="start"):
        core.link(tokens, older, slots, 4, -1)
    with pytest.raises(TypeError):
        core.link((1, 2), older, slots, 4, 0)
    table = RecycledLogits(100)
    best, evidence = rows(random.Random(0), 1)
    with pytest.raises(ValueError, match="a parent before it"):
        core.put_nodes(table.arrays, 0, (1, 2), (-1, 1), (), best.astype(np.int32), evidence)
    wide = (1, NUM_KEPT + 1)
    with pytest.raises(ValueError, match="a parent before it"):
        core.put_nodes(table.arrays, 0, (1,), (-1,), (), np.zeros(wide, dtype=np.int32), np.zeros(wide, np.float32))
    with pytest.raises(ValueError, match="room for at most"):
        core.read_logits(np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32), 4, 2)
    with pytest.raises(ValueError, match="of its size"):
        core.put_nodes((*table.arrays[:4], 1_000, 4), 0, (1,), (-1,), (), best.astype(np.int32), evidence)


@pytest.mark.parametrize("token", [2**21 - 1, 3_000_000, 2**31 - 2, -1, -200])
def test_tokens_beyond_a_key_s_bits_stay_within_the_table(core: Any, token: int) -> None:
    """No vocabulary has them, a damaged memory may; keys of them are below 0, of which C's remainders are too."""
    tables, result = [], []
    best, log_probs = rows(random.Random(0), 6)
    native.core = core
    for put_nodes, search_of in ((RecycledLogits.put_nodes, Search), (recycled.put_nodes, PythonSearch)):
        memory, index = SpecMemory(40, 300), NgramIndex(4)
        index.extend([token, 1, token, token, token])
        tokens, parents = (token, token, 1, token, token, token), (-1, 0, 1, 2, 3, 4)
        put_nodes(memory.recycled, tokens, parents, (7, token), best, log_probs)
        tables.append([row.tolist() for row in memory.recycled.arrays[:4]])
        result.append(search_of(Sources(memory, is_sampled=False), index).likeliest(8, 1e-3).tokens)
    assert tables[0] == tables[1]
    assert len(result[0]) > 1


def test_a_search_refuses_what_it_does_not_know(core: Any) -> None:
    native.core = core
    sources, index = Sources(SpecMemory(10, 10), is_sampled=False), NgramIndex(4)
    with pytest.raises(ValueError, match="must have a token"):
        Search(sources, index)
    index.extend([1])
    search = Search(sources, index)
    for node in (-1, 1, 10**6):
        with pytest.raises(IndexError, match="no such node"):
            search.token(node)
    assert search.child(0, 5) == -1
    with pytest.raises(ValueError, match="needs a parent"):
        native.core.Search.follow(search._search, (1, 2), (-1,), (1,))
    assert search.likeliest(8, 1e-3).tokens == (1,)


def test_a_process_without_the_core_says_so_once_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "hf_specdec.kernels.native._core", None)
    monkeypatch.delattr(native, "_core")
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        result = runpy.run_path(str(Path(native.__file__)))
    assert result["core"] is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "Install a C compiler (apt install gcc)" in warning
