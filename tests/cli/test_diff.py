"""`hf-specdec diff`: the first token that differs from plain `generate`'s, and the part of the engine behind it."""

import json
from typing import Any

import pytest

import hf_specdec
from hf_specdec import embedded
from hf_specdec.engine.sampling.tokens_ahead import TokensAhead
from hf_specdec.errors import ConfigError
from hf_specdec.forward import tree_mask
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.kernels import cpu, linear
from hf_specdec.tools.cli.diff import Search
from tests.cli.conftest import Run
from tests.helpers.devices import DEVICE, EmulatedDevice, moved

HOW = {"spec_method": "auto", "spec_config": {"num_nodes": 16}}

STACK = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Remove and return the item on top."""
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()


class Queue:
    """A first-in, first-out collection."""

'''


def search(tokenizer: Any, precision: str = "fp32", **options: Any) -> Search:
    """A search with the embedded target, which has been probed."""
    target = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision=precision)
    hf_specdec.capability(target)
    return Search(target, tokenizer, 0, {"max_new_tokens": 48, "do_sample": False, **options}, HOW)


def test_equal_texts_end_the_search(run: Run) -> None:
    result = run("diff", "--dtype", "fp32", "--max-new-tokens", "24", "def add(a, b):", "class Stack:", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["rows"] == [{"off": "nothing", "difference": None}]


def test_a_fault_of_the_tree_mask_is_found_in_the_trees(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = search(tokenizer)

    def all_see_all(rows: Any, mask_function: Any, q_offset: int) -> Any:
        return lambda batch, head, query, key: key >= 0

    monkeypatch.setattr(tree_mask, "_split_view", all_see_all)
    monkeypatch.setattr(tree_mask, "_general_view", all_see_all)
    *_, last = looks.run([tokenizer(STACK)["input_ids"]])
    assert last == ("trees", None)
    assert hf_specdec.capability(looks.model).tier == "tree"


@pytest.mark.skipif(cpu.why_unused() is not None, reason="torch computes everything here")
def test_a_fault_of_a_kernel_is_found_in_the_kernels(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, computed = search(tokenizer, "bf16"), linear.core_product
    monkeypatch.setattr(linear, "core_product", lambda *args, **kwargs: computed(*args, **kwargs) * 1.5)
    *_, (name, difference) = looks.run([tokenizer(STACK)["input_ids"]])
    assert name == "CPU kernels"
    assert difference is None


def test_a_fault_of_the_nodes_processors_is_found_in_them(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, token_after = search(tokenizer, do_sample=True, temperature=0.7), TokensAhead.token_after
    monkeypatch.setattr(TokensAhead, "token_after", lambda self, node: (token_after(self, node) or 1) - 1)
    with EmulatedDevice():
        looks.model = moved(looks.model, DEVICE)
        rows = looks.run([tokenizer(STACK)["input_ids"]])
    assert rows[0][1] is not None and rows[0][1].place == 0 and rows[0][1].gap is None
    assert rows[-1] == ("processors of all nodes at once", None)


def test_a_fault_of_the_batch_is_found_in_it(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, forward = search(tokenizer), ModelRunner.forward
    prompts = [tokenizer(text)["input_ids"] for text in (STACK, "class Queue:\n")]
    assert looks.run(prompts) == [("nothing", None)]

    def negated(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        self.outputs.logits[1:].neg_()
        return outputs

    monkeypatch.setattr(ModelRunner, "forward", negated)
    *_, last = looks.run(prompts)
    assert last == ("the batch", None)


def test_the_first_difference_is_described(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = search(tokenizer)
    ids = tokenizer(STACK)["input_ids"]
    looks.how = {"spec_method": "plain", "bad_words_ids": None, "max_new_tokens": 12}
    _, difference = looks.run([ids])[0]
    assert difference is not None
    assert (difference.prompt, difference.place, difference.found, difference.gap) == (0, 12, None, None)


def test_a_call_without_a_method_is_refused(run: Run) -> None:
    result = run("diff", "--spec-method", "none")
    assert isinstance(result.exception, ConfigError) or "must name a method" in result.stderr
    assert result.exit_code != 0


def test_sampled_batches_are_refused(run: Run) -> None:
    result = run("diff", "--do-sample", "one", "two")
    assert "must come with one prompt" in result.stderr
    assert result.exit_code == 2
