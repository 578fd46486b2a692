"""Over a static cache an accelerator begins the next forward before the host reads a token, where nothing is drafted.

The accelerator is the CPU: graphs run as they are written, and each call writes over what earlier ones have returned.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StaticCache, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import compat
from hf_specdec.common import transfer
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat import CACHE
from hf_specdec.engine import static_shapes
from hf_specdec.forward import next_forward
from hf_specdec.forward.model_runner import ModelRunner
from tests.helpers.devices import emulate
from tests.helpers.graphs import STATIC, LendingCompiler, on_cpu
from tests.helpers.support import PROMPT, assert_same_cache, plain
from tests.helpers.tokenizers import characters
from tests.helpers.zoo import FAMILIES, build

NEW = 14
OWN: dict[str, Any] = {"spec_method": "plain", "compile_config": on_cpu("eager"), "return_dict_in_generate": True}


class Begun:
    """What happens: `begin` and `wait` of each read, `forward` of each launch of the model's."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @property
    def count(self) -> int:
        """Forwards begun before the host had read the token."""
        return self.events.count("begin")


@pytest.fixture
def model() -> Any:
    llama = FAMILIES["llama"]
    made = hf_specdec.enable(build(dataclasses.replace(llama, options={**llama.options, "num_hidden_layers": 1})))
    made.generate(PROMPT, max_new_tokens=4, spec_method="plain")  # tries the model
    return made


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """The CPU as a device like CUDA's, and what is begun there."""
    found, compute = Begun(), ModelRunner._compute

    class Read(transfer.PendingRead):
        def __init__(self, tensor: torch.Tensor) -> None:
            found.events.append("begin")
            super().__init__(tensor)

        def wait(self) -> Any:
            found.events.append("wait")
            return super().wait()

    def launch(self: ModelRunner, *arguments: Any) -> None:
        found.events.append("forward")
        compute(self, *arguments)

    emulate(monkeypatch)
    monkeypatch.setattr(static_shapes, "is_host", lambda device: False)
    monkeypatch.setattr(transfer, "STAGED", {"cpu"})
    monkeypatch.setattr(compat, "compiled", LendingCompiler())
    monkeypatch.setattr(compat, "without_guards", lambda *_: None)
    monkeypatch.setattr(compat, "mark_step_begin", lambda: None)
    monkeypatch.setattr(next_forward, "PendingRead", Read)
    monkeypatch.setattr(ModelRunner, "_compute", launch)
    return found


def padded(batch: int) -> dict[str, torch.Tensor]:
    """Prompts of a batch, all but the first with three tokens of padding in front."""
    ids = torch.stack([PROMPT[0].roll(row) for row in range(batch)])
    mask = torch.ones_like(ids)
    mask[1:, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_text_to_its_full_length_is_plain_generates_and_nothing_is_computed_in_vain(
    model: Any, begun: Begun, batch: int
) -> None:
    how = {**padded(batch), "max_new_tokens": NEW, **STATIC}
    expected = plain(model, **how, disable_compile=True)
    model.generate(**how, **OWN)  # tries whether rows can be parted
    begun.events.clear()
    output = model.generate(**how, **OWN)
    assert output.sequences.tolist() == expected.tolist()
    assert begun.events.count("forward") == NEW - 1 == output.spec_stats.num_forwards
    assert begun.count == NEW - 2, "all but the first after the prompt"
    assert begun.events[1:4] == ["begin", "forward", "wait"]


@pytest.mark.parametrize("batch", [1, 2])
def test_what_was_begun_after_the_last_token_leaves_nothing_behind(model: Any, begun: Begun, batch: int) -> None:
    """Each row ends with another token; the caller's cache holds what plain generate's does, and goes on from there."""
    how = {**padded(batch), **STATIC}
    free = plain(model, **how, max_new_tokens=NEW, disable_compile=True)[:, PROMPT.shape[1] :].tolist()
    how |= {"eos_token_id": [row[place] for row, place in zip(free, (6, 3), strict=False)], "pad_token_id": 0}
    del how["cache_implementation"]
    results = []
    for method in ({"disable_compile": True, "spec_method": None, "return_dict_in_generate": True}, OWN):
        cache = StaticCache(model.config, max_cache_len=64)
        first = model.generate(**how, max_new_tokens=NEW, **{CACHE: cache}, **method)
        results.append((first, cache))
    (expected, theirs), (ours, own) = results
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert ours.sequences.shape[1] < PROMPT.shape[1] + NEW
    assert begun.count
    assert_same_cache(own, theirs)


@pytest.mark.parametrize("stop", ["eos", "length"])
def test_a_further_call_begins_anew(model: Any, begun: Begun, stop: str) -> None:
    """Over the buffers that the last call has left, in which a forward may have written more than its text."""
    for length in (20, 16):
        how = {"input_ids": PROMPT[:, :length], "max_new_tokens": NEW, **STATIC}
        expected = plain(model, **how, disable_compile=True)
        if stop == "eos":
            how["eos_token_id"] = expected[0, length + 4].item()
            expected = plain(model, **how, disable_compile=True)
        assert model.generate(**how, **OWN).sequences.tolist() == expected.tolist()
        assert begun.count
        begun.events.clear()


def test_transformers_streamer_gets_each_token_in_order(model: Any, begun: Begun) -> None:
    """It is no code of the caller's, so the device computes while it decodes."""
    texts = []
    for method in ({"disable_compile": True, "spec_method": None}, OWN):
        streamer = TextIteratorStreamer(characters(), skip_prompt=True)
        output = model.generate(PROMPT, max_new_tokens=NEW, **STATIC, **method, streamer=streamer)
        texts.append((list(streamer), output if method is not OWN else output.sequences))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1].equal(texts[1][1])
    assert begun.count


class Own(BaseStreamer):
    """A caller's streamer."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "top_k": 20},
    "scores": {"output_scores": True},
    "hidden states": {"output_hidden_states": True},
    "a processor": {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)])},
    "a caller's streamer": {"streamer": Own()},
    "an observer": {"spec_observer": lambda step: None},
    "drafts": {"spec_method": "prompt_lookup"},
}


@pytest.mark.parametrize("reason", SYNCHRONOUS)
def test_the_host_chooses_where_anyone_sees_more_than_the_token(model: Any, begun: Begun, reason: str) -> None:
    how = {"input_ids": PROMPT, "max_new_tokens": NEW, **STATIC}
    own = {key: value for key, value in SYNCHRONOUS[reason].items() if not key.startswith(("spec", "streamer"))}
    torch.manual_seed(2)
    expected = plain(model, **how | own, disable_compile=True)
    torch.manual_seed(2)
    output = model.generate(**how | OWN | SYNCHRONOUS[reason])
    assert output.sequences.tolist() == expected.tolist()
    assert not begun.count


def test_ctrl_c_while_the_host_waits_leaves_a_cache_from_which_the_text_goes_on(
    model: Any, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0

    class Interrupted(transfer.PendingRead):
        def wait(self) -> Any:
            nonlocal waits
            waits += 1
            if waits == 5:
                raise KeyboardInterrupt
            return super().wait()

    expected = plain(model, PROMPT, max_new_tokens=NEW, **STATIC, disable_compile=True)
    cache = StaticCache(model.config, max_cache_len=64)
    monkeypatch.setattr(next_forward, "PendingRead", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, max_new_tokens=NEW, **{CACHE: cache}, **OWN)
    length = int(cache.get_seq_length())
    assert PROMPT.shape[1] < length < expected.shape[1] - 1
    text = expected[:, : length + 1]
    rest = model.generate(text, max_new_tokens=expected.shape[1] - length - 1, **{CACHE: cache}, **OWN)
    assert rest.sequences.tolist() == expected.tolist()


def test_a_forward_begun_for_other_tokens_is_forgotten(model: Any, begun: Begun, monkeypatch: Any) -> None:
    """Whatever the host decides; here it is made to believe that others were computed."""
    adopts, adopted = ModelRunner._adopts_next, []

    def mistaken(self: ModelRunner, trees: Sequence[DraftTree | None]) -> bool:
        if self.next_tokens is not None and len(adopted) % 2:
            self.next_tokens = [token + 1 for token in self.next_tokens]
        adopted.append(adopts(self, trees))
        return adopted[-1]

    monkeypatch.setattr(ModelRunner, "_adopts_next", mistaken)
    expected = plain(model, PROMPT, max_new_tokens=NEW, **STATIC, disable_compile=True)
    assert model.generate(PROMPT, max_new_tokens=NEW, **STATIC, **OWN).sequences.tolist() == expected.tolist()
    assert {True, False} == set(adopted)
    assert begun.events.count("forward") > NEW - 1
