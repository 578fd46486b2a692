"""What a step costs besides the forward: operations, each a launch on a GPU, and reads, each a stop of it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import AutoTokenizer

import hf_specdec
from tests.helpers.devices import emulate
from tests.helpers.operations import OperationCounter, StepOperations
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return width *"
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead"},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 32}},
    "auto_chain": {"spec_method": "auto", "spec_config": {"num_nodes": 4}},
}
CACHES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}
PENALTY = {"repetition_penalty": 1.1}
ALL = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05, **PENALTY}
TOP_K = tf.TopKLogitsWarper(50)  # the default
PROCESSORS: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, [TOP_K]),
    ({"top_p": 0.9}, [TOP_K, tf.TopPLogitsWarper(0.9)]),
    (PENALTY, [tf.RepetitionPenaltyLogitsProcessor(1.1), TOP_K]),
    (
        ALL,
        [
            tf.RepetitionPenaltyLogitsProcessor(1.1),
            tf.TemperatureLogitsWarper(0.7),
            TOP_K,
            tf.TopPLogitsWarper(0.9),
            tf.MinPLogitsWarper(0.05),
        ],
    ),
]
FIRST = 1  # steps in which masks are tried out and buffers are made


@pytest.fixture
def model() -> Any:
    """A model of the test's own: one that remembers another test's text drafts all of it in one step."""
    path = hf_specdec.embedded.path("target")
    return hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32")


@pytest.fixture(scope="module")
def inputs() -> Any:
    return AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))(TEXT, return_tensors="pt")


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The CPU as it is, and as an accelerator: inputs are copied there, and what is read is brought by a transfer."""
    if request.param == "device":
        emulate(monkeypatch)
    yield request.param


def making(method: str) -> int:
    """Later steps that make buffers or masks: one where a method's first draft may be narrower, or a chain."""
    return 1 if method.startswith("auto") else 0


def steps_of(model: Any, inputs: Any, method: dict[str, Any], **options: Any) -> tuple[list[StepOperations], Any]:
    """The steps of one call, and its tokens."""
    arguments = {**inputs, "max_new_tokens": 20, "do_sample": False, **method, **options}
    model.generate(**arguments | {"max_new_tokens": 2})  # probes
    torch.manual_seed(0)
    counter = OperationCounter(model)
    with counter:
        tokens = model.generate(**arguments, spec_observer=counter.end_step)
    return counter.steps[FIRST:], tokens[0].tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", METHODS)
def test_a_greedy_step_reads_once(model: Any, inputs: Any, place: str, method: str, cache: str) -> None:
    """At most 20 operations outside the forward, whatever was accepted, 15 on a device; no read waits on a CPU."""
    steps, tokens = steps_of(model, inputs, METHODS[method], **CACHES[cache])
    assert tokens == model.generate(**inputs, max_new_tokens=20, do_sample=False, spec_method=None)[0].tolist()
    assert {step.reads for step in steps} <= ({0} if place == "host" else {1})
    most = 20 if place == "host" else 15
    assert sorted(step.outside for step in steps)[-1 - making(method)] <= most
    assert max(step.num_tokens for step in steps) > 1


@pytest.mark.at_most(1)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", ["chain", "lookahead", "auto"])
def test_a_sampled_step_reads_once_a_token(model: Any, inputs: Any, place: str, method: str, cache: str) -> None:
    """At most 12 operations outside the forward, and 8 for each token; the draws are plain generation's.

    On a device they come with the read of the step.
    """
    steps, tokens = steps_of(model, inputs, METHODS[method], **CACHES[cache], do_sample=True)
    torch.manual_seed(0)
    assert tokens == model.generate(**inputs, max_new_tokens=20, do_sample=True, spec_method=None)[0].tolist()
    for step in steps:
        assert step.reads <= (step.num_tokens if place == "host" else 1)
    assert sorted(step.outside - 8 * step.num_tokens for step in steps)[-1 - making(method)] <= 12


@pytest.mark.at_most(1)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", ["auto", "auto_chain"])
@pytest.mark.parametrize(("kwargs", "processors"), PROCESSORS, ids=["top_k", "top_p", "penalty", "all"])
def test_processors_are_called_once_a_step_on_a_device(
    model: Any,
    inputs: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    cache: str,
    kwargs: dict[str, Any],
    processors: list[Any],
) -> None:
    """A step takes what they take for one row, six operations more, and eight for each token."""
    counter = OperationCounter(model)
    with counter:
        tf.LogitsProcessorList(processors)(inputs.input_ids, torch.randn(1, model.config.vocab_size))
    counter.end_step(SimpleNamespace(accepted=()))
    of_processors = counter.steps[0].outside - 1  # without `randn`
    emulate(monkeypatch)
    steps, _ = steps_of(model, inputs, METHODS[method], **CACHES[cache], do_sample=True, **kwargs)
    assert max(step.outside - 8 * step.num_tokens for step in steps) <= of_processors + 6


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("method", "batch"), [("lookahead", 1), ("lookahead", 2), ("auto_chain", 3)])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "eager")]
)
def test_windows_and_eager_attention_take_no_more(
    family: str, attention: str, place: str, cache: str, method: str, batch: int
) -> None:
    """At most 20 operations outside the forward once the rule of the masks is found, here in steps of whole batches."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    model.set_attn_implementation(attention)
    ids = PROMPT.repeat(batch, 1)
    ids[-1, :4], mask = 0, (ids >= 0).long()
    mask[-1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    counter = OperationCounter(model)
    with counter:
        tokens = model.generate(ids, **options, **METHODS[method], **CACHES[cache], spec_observer=counter.end_step)
    assert tokens.tolist() == plain(model, ids, **options).tolist()
    whole = [step for step in counter.steps[2:] if step.outside]  # a row's step is counted with its batch's first row
    assert len(whole) > 2
    assert sorted(step.outside for step in whole)[-2] <= 20, "but for the step in which a row leaves"
