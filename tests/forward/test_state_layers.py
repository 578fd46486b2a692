"""Recorded forwards of layers with states: each node of a tree as its path alone, each commit as plain decoding."""

import copy
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_specdec
from hf_specdec.cache.state_layer import Columns
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat import state_layers
from hf_specdec.compat.caches import contents
from hf_specdec.forward.capabilities.reference import arguments, reference
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.text_rows import TokenBuffer, TreeLayout
from hf_specdec.kernels.recurrences import StateColumns
from tests.helpers.drafts import RandomTreeDrafter
from tests.helpers.support import plain
from tests.helpers.zoo_wide import build, shrunk

FAMILIES = "bailing_hybrid bamba falcon_h1 granitemoehybrid kimi_linear lara_mini lfm2".split()
FAMILIES += "mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_next zamba2".split()
PROMPTS = torch.tensor([[9, 4, 17, 6, 3, 11, 2], [5, 8, 2, 14, 7, 3, 19]])
PARENTS = [0, 0, 1, 1, 2, 3, 5, 4]  # of nodes 1 to 8
TOKENS = [3, 12, 7, 7, 15, 4, 9, 21, 6]


def model_of(name: str) -> Any:
    model = build(shrunk(name), "causal", 0.15)
    assert state_layers.known_state_layers(model)
    return model


def runner(model: Any, prompts: torch.Tensor) -> ModelRunner:
    """A runner that has read the prompts."""
    texts = [TokenBuffer(row[None], room=32) for row in prompts]
    target = ModelRunner(model, prompts, GenerationConfig(), arguments(model, prompts, {}), texts, tier="tree")
    target.prefill()
    for text in target.texts:
        text.append(TOKENS[0])
    return target


def tree(num_nodes: int = len(TOKENS)) -> DraftTree:
    builder = TreeBuilder(TOKENS[0])
    for parent, token in zip(PARENTS[: num_nodes - 1], TOKENS[1:num_nodes], strict=True):
        builder.add(parent, token)
    return builder.build()


def path_to(node: int) -> list[int]:
    return [*path_to(PARENTS[node - 1]), node] if node else [0]


def plainly(model: Any, prompt: torch.Tensor, tokens: list[int]) -> Any:
    """What plain decoding computes of `tokens` after a prompt."""
    prompt = prompt[None]
    return reference(model, arguments(model, prompt, {}), prompt, torch.tensor([tokens]))


def assert_equal_states(cache: Any, expected: Any) -> None:
    for ours, wanted in zip(contents(cache), contents(expected), strict=True):
        error = (ours.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-9)
        assert error < 1e-4


@pytest.fixture(params=[True, False], ids=["core", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrences by the core, or by torch as on accelerators."""
    if not request.param:
        monkeypatch.setattr(StateColumns, "is_cores", lambda *_: False)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_nodes_of_trees_follow_from_their_parents(name: str) -> None:
    """Trees that grow by a second forward; rows that keep paths of different lengths; then one step more."""
    model = model_of(name)
    target = runner(model, PROMPTS)
    first = target.forward([tree(5)] * 2)
    second = target.forward([tree()] * 2)
    for row, prompt in enumerate(PROMPTS):
        result = torch.cat([first[row], second[row]])
        for node in range(len(TOKENS)):
            path = path_to(node)
            wanted = plainly(model, prompt, [TOKENS[item] for item in path]).logits[0, -1]
            torch.testing.assert_close(result[node], wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)
    paths = [path_to(7), path_to(4)]
    target.commit(paths)
    for text, path in zip(target.texts, paths, strict=True):
        for node in path[1:]:
            text.append(TOKENS[node])
        text.append(1)
    result = target.forward([DraftTree.chain(1, [2]), DraftTree.chain(1, [8])])
    for row, path in enumerate(paths):
        tokens = [TOKENS[node] for node in path]
        wanted = plainly(model, PROMPTS[row], [*tokens, 1]).logits[0, -1]
        torch.testing.assert_close(result[row][0], wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("node", [0, 7])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_states_are_picked_by_the_path_that_is_kept(name: str, node: int) -> None:
    model = model_of(name)
    target = runner(model, PROMPTS[:1])
    target.forward([tree()])
    target.commit([path_to(node)])
    target.close()
    expected = plainly(model, PROMPTS[0], [TOKENS[item] for item in path_to(node)])
    assert_equal_states(target.cache.handed_out, expected.cache)


@pytest.mark.at_most(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "nemotron_h", "qwen3_next", "zamba2"])
def test_no_token_is_computed_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch and prompts of a job that accept different numbers of tokens, none of which is left to be fed."""
    model = hf_specdec.enable(model_of(name))
    call: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    ids, mask = PROMPTS.repeat(1, 2), torch.ones(2, 14, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    expected = plain(model, ids, attention_mask=mask, **call).tolist()
    fed: list[int] = []

    def watch(self: TreeLayout, pending: Any) -> None:
        fed.append(len(pending))
        begin(self, pending)

    begin = TreeLayout.__init__
    monkeypatch.setattr(TreeLayout, "__init__", watch)
    texts = itertools.cycle(expected)
    output = model.generate(
        ids,
        attention_mask=mask,
        **call,
        spec_method=lambda: RandomTreeDrafter(next(texts)),
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == expected
    assert output.spec_stats.num_accepted_tokens > 0
    prompts = [[5, 8, 2, 14, 5, 8, 2], [9, 4, 17, 6, 3, 9, 4, 17], [3, 3, 3]]
    alone = [plain(model, torch.tensor([prompt]), **call)[0, len(prompt) :].tolist() for prompt in prompts]
    results = sorted(hf_specdec.generate_many(model, prompts, **call, max_batch_size=2), key=lambda item: item.index)
    assert [result.token_ids for result in results] == alone
    assert results[0].stats.plan.shares_batch
    assert len(fed) > 20 and not any(fed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next"])
@torch.no_grad()
def test_a_forward_that_did_not_finish_leaves_no_trace(name: str) -> None:
    model = model_of(name)
    target = runner(model, PROMPTS[:1])
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.forward([tree()])
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    target.close()
    assert_equal_states(target.cache.handed_out, plainly(model, PROMPTS[0], []).cache)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_other_threads_and_copies_compute_as_always() -> None:
    """While a forward is recorded."""
    model = model_of("qwen3_next")
    expected = model(PROMPTS).logits
    result: list[torch.Tensor] = []

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=lambda: result.append(model(PROMPTS).logits))
        handle.remove()
        thread.start()
        thread.join()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copies.append(other)

    copies: list[Any] = []
    target = runner(model, PROMPTS[:1])
    handle = model.model.layers[1].register_forward_pre_hook(meanwhile)
    target.forward([tree()])
    assert torch.equal(result[0], expected)
    for other in copies:
        with torch.no_grad():
            assert torch.equal(other(PROMPTS).logits, expected)
        target = runner(other, PROMPTS[:1])
        target.forward([tree()])
        assert not any("forward" in vars(module) for module in other.modules())


@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_not_known_keep_their_own_forwards() -> None:
    """One that is replaced, compiled, or whose file has other functions: chains, whose states are copied."""
    model = model_of("qwen3_next")
    layer = state_layers.known_state_layers(model)[0]
    layer.forward = layer.forward
    assert runner(model, PROMPTS[:1]).tier == "chain"
    assert not state_layers.known_state_layers(build(shrunk("zaya"), "causal", 0.15))


def test_columns_know_their_parents() -> None:
    """Two rows; the first has a column of padding, which sees itself alone."""
    chain = torch.ones(3, 3).tril().bool().numpy()
    branch = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().numpy()
    columns, cpu = Columns(torch.tensor([chain.tolist(), branch.tolist()]).numpy()), torch.device("cpu")
    assert columns.parents.tolist() == [[-1, 0, 1], [-1, 0, 0]]
    assert not columns.is_chain
    assert columns.windows(2, cpu).tolist() == [[[1, 2], [2, 3], [3, 4]], [[1, 2], [2, 3], [2, 4]]]
    kept = columns.kept([[0, 1, 2], []])
    assert kept.windows(2, cpu).tolist() == [[3, 4], [0, 1]]
    assert (kept.ends_chain, kept.last.tolist()) == (None, [2, -1])
