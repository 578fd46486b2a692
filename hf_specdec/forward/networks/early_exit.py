"""A model in two parts that share its weights: its first layers with its own norm and head, and the layers after them.

The first part drafts. What its last layer returned is what the second part goes on with, so that a verify pass does
not compute it again. Knows nothing of trees and caches.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.networks.layer_cut import cut_after, layers_of, path_to_layers, shallow_copy, with_modules
from hf_specdec.forward.target.model_facts import ModelFacts


class EarlyExit:
    """The two parts of one model, for one call.

    Args:
        layers (`int`): layers of the first part, at least 1 and fewer than the model has.
        facts: what is known of the model's structure.

    Attributes:
        draft (`PreTrainedModel`): the first layers, the final norm and the head.
        headless (`PreTrainedModel`): the same with logits of zeros.
        rest (`PreTrainedModel`): the whole model, whose first layers return what `resume_from` was given.

    Raises:
        UnsupportedModelError: the model's layers cannot be told from its other parts.
    """

    def __init__(self, model: PreTrainedModel, layers: int, facts: ModelFacts | None = None) -> None:
        facts = facts or ModelFacts()
        path = facts.of(path_to_layers, model)
        own = list(layers_of(model, path))
        self._between = between = _Between()
        first = torch.nn.ModuleList([*own[: layers - 1], _watched(own[layers - 1], between)])
        rest = torch.nn.ModuleList([*(_skipped(layer, between) for layer in own[:layers]), *own[layers:]])
        for part in (first, rest):
            part.training = model.training
        self.draft = cut_after(model, path, first)
        self.headless = with_modules(self.draft, _without_head(self.draft, facts.of(_names_of_head, model)))
        self.rest = with_modules(model, {path: rest})

    @property
    def states(self) -> torch.Tensor:
        """`(batch, Q, hidden_size)`: what the first layers made of the last forward's Q tokens.

        Raises:
            UnsupportedModelError: they return something else.
        """
        output = self._between.output
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, torch.Tensor) or states.ndim != 3:
            raise UnsupportedModelError("its layers return no hidden states of three dimensions")
        return states

    def resume_from(self, states: torch.Tensor) -> None:
        """Let `rest` go on with `(batch, Q, hidden_size)` states."""
        output = self._between.output
        self._between.given = (states, *output[1:]) if isinstance(output, tuple) else states


@dataclass(slots=True)
class _Between:
    """States that pass from one part to the other. Knows neither, so that both are freed with their last reference.

    Attributes:
        output: of the first part's last layer.
        given: what the first layers of the whole model return.
    """

    output: Any = None
    given: Any = None


def _watched(layer: torch.nn.Module, between: _Between) -> torch.nn.Module:
    """The layer, whose output is kept."""
    twin, compute = shallow_copy(layer), layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        between.output = compute(*args, **kwargs)
        return between.output

    twin.forward = forward
    return twin


def _skipped(layer: torch.nn.Module, between: _Between) -> torch.nn.Module:
    """Takes the place of a layer that has computed already: same class and attributes, no modules to walk through.

    Those inside are attributes like others, as some models read a setting of their first layer's attention.
    """
    twin = shallow_copy(layer)
    vars(twin).update(layer._modules)  # noqa: SLF001 and below, torch's
    twin._modules = {}  # noqa: SLF001
    twin.forward = lambda *args, **kwargs: between.given
    return twin


class _NoHead(torch.nn.Module):
    """Logits that are not read."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros((*states.shape[:-1], self.vocab_size))


def _names_of_head(model: PreTrainedModel) -> tuple[str, ...]:
    """Place of the model's head; none where the model does not say which module it is."""
    head = model.get_output_embeddings()
    return tuple(name for name, module in model.named_modules() if module is head)


def _without_head(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """Replacement of the model's head, by its name."""
    head = model.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        return {}
    return {name: _NoHead(len(head.weight)) for name in names}
