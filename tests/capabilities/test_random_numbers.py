"""Trying a model takes no random numbers of the call: not where forwards draw, and none of other threads."""

import threading
from typing import Any

import torch

from tests.helpers.support import PROMPT, plain, speculative

CALL: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8}


def drawn(model: Any, generate: Any, **kwargs: Any) -> tuple[list[int], torch.Tensor]:
    """A text and the random state after it."""
    torch.manual_seed(3)
    return generate(model, PROMPT, **CALL | kwargs)[0].tolist(), torch.get_rng_state()


def test_the_first_call_of_a_model_whose_forwards_draw_is_plain_generates(fresh: Any) -> None:
    """As Reformer's do, in eval mode too."""
    embeddings = fresh.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, output: output + torch.rand_like(output))
    expected, state = drawn(fresh, plain)
    text, own_state = drawn(fresh, speculative, spec_method="auto")
    assert text == expected
    assert torch.equal(own_state, state)


def test_numbers_of_other_threads_are_not_drawn_again(fresh: Any, probes: list[str]) -> None:
    """A thread draws while the model is probed, and not after it."""
    seen: list[torch.Tensor] = []

    def draw(*_: Any) -> None:
        if len(seen) < 3:
            thread = threading.Thread(target=lambda: seen.append(torch.rand(1)))
            thread.start()
            thread.join()

    fresh.get_input_embeddings().register_forward_pre_hook(draw)
    torch.manual_seed(3)
    fresh.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method="prompt_lookup")
    assert probes
    assert torch.rand(1) not in torch.cat(seen)
