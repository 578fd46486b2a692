"""Knowledge that the rules read: of a model as it is now, and of the call that transformers prepared for it."""

import copy
from functools import cached_property
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.request import Request
from hf_specdec.compat.fingerprint import Fingerprint, fingerprint
from hf_specdec.compat.rotary import position_limit
from hf_specdec.engine.call import Call
from hf_specdec.engine.cost.cost_model import StepCosts
from hf_specdec.engine.draft_pairing import draft_capability, translations_of
from hf_specdec.engine.head_pairing import own_head_of
from hf_specdec.engine.model_state import state_of
from hf_specdec.forward.capabilities.findings import Found
from hf_specdec.forward.forward_arguments import rows_of
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.model_runner import Tier
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.translation import Translation


class Facts:
    """Facts about one call, each found when it is first asked for; the same model and inputs give the same facts.

    Args:
        call: as transformers prepared it; without it only facts about the model are known.

    Attributes:
        model (`PreTrainedModel`): the target.
        chain_reason (`str | None`): why the call verifies chains, for another reason than its model.
    """

    def __init__(self, model: PreTrainedModel, call: Call | None = None) -> None:
        self.model, self._call = model, call
        self.chain_reason: str | None = None
        self._draft: tuple[Tier, ModelFacts] | None = None
        self._translations: list[Translation] | None = None

    @property
    def name(self) -> str:
        """Class of the model, for messages."""
        return type(self.model).__name__

    @property
    def call(self) -> Call:
        """The prepared call."""
        assert self._call is not None
        return self._call

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of the model's forward besides token ids: masks, positions, cache, encoder outputs."""
        return self.call.model_kwargs

    @property
    def num_rows(self) -> int:
        """Sequences of the call."""
        return len(self.call.input_ids)

    @property
    def cache(self) -> Any:
        """The cache among `kwargs`, or `None`."""
        return self.call.cache

    @property
    def has_static_cache(self) -> bool:
        """True if the call has a static cache, which an encoder-decoder holds within its own."""
        return isinstance(getattr(self.cache, "self_attention_cache", self.cache), compat.StaticCache)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The model's fingerprint."""
        return fingerprint(self.model) if self._call is None else self._call.now

    @cached_property
    def structure(self) -> ModelFacts:
        """Facts that follow from the model's structure alone."""
        return state_of(self.model).facts_of(self.fingerprint)

    @cached_property
    def probed(self) -> Found:
        """Results of the model's probe."""
        return state_of(self.model).findings.of(self.model, self.encoder_kwargs, now=self.fingerprint)

    @property
    def tier(self) -> Tier:
        """Tier of the call: a tree, a chain, or one token (`"plain"`) verified by a forward."""
        return self.probed.capability.tier if self.chain_reason is None else "chain"

    @property
    def tier_reason(self) -> str:
        """Reason for the tier."""
        return self.chain_reason or self.probed.capability.reason

    @property
    def rounding_reason(self) -> str | None:
        """Reason why a token's logits may depend on the others of its forward, by their rounding, or `None`."""
        return self.probed.rounding_reason(self.model)

    @property
    def encoder_kwargs(self) -> dict[str, Any] | None:
        """Encoder outputs and mask of the call's first row, with which the probe tries a decoder."""
        if self._call is None:
            return None
        probed = {name: self.kwargs.get(name) for name in ("encoder_outputs", "attention_mask")}
        if probed["encoder_outputs"] is None:
            return None
        return rows_of({name: value for name, value in probed.items() if value is not None}, [0], self.num_rows)

    def batch_reason(self) -> str | None:
        """Reason to decode batches plainly, or `None`; the model is probed at its first batch."""
        return self.probed.batch_fallback_reason(self.model, self.encoder_kwargs)

    def with_chains_only(self, reason: str) -> "Facts":
        """The same for a call that verifies chains for another reason than its model."""
        facts = copy.copy(self)
        facts.chain_reason = reason
        return facts

    def network(self, request: Request) -> PreTrainedModel | DraftHead | None:
        """The draft model or head of a call, be it one of the target's own checkpoint; `None` without one.

        Raises:
            CheckpointError, UnsupportedModelError: the target's checkpoint has no head.
        """
        if request.assistant_model is not None or request.config.drafting_layers is not None:
            return cast("PreTrainedModel | DraftHead | None", request.assistant_model)
        return own_head_of(self.model, request.method, request.config)

    def draft(self, request: Request) -> tuple[Tier, ModelFacts]:
        """Forwards that the call's draft model computes right, and facts that follow from its structure.

        Raises:
            ConfigError: target and draft do not go together.
            UnsupportedModelError: the draft cannot roll back.
        """
        if self._draft is None:
            draft, translates = request.assistant_model, request.tokenizers is not None
            now = fingerprint(draft)
            tier = draft_capability(self.model, draft, translates=translates, now=now).tier
            self._draft = tier, state_of(draft).facts_of(now)
        return self._draft

    def translations(self, request: Request) -> list[Translation] | None:
        """Each row's prompt in the draft model's vocabulary; `None` where that is the target's."""
        if self._translations is None and request.tokenizers is not None:
            self._translations = translations_of(self.call, *request.tokenizers)
        return self._translations

    def drafts_with_network(self, request: Request) -> bool:
        """Returns whether the call's network, if it has one, has positions for its prompt."""
        network = self.network(request)
        if network is None or isinstance(network, DraftHead) or self._call is None:
            return network is not None
        limit = self.draft(request)[1].of(position_limit, network)
        if limit is None:
            return True
        translations = self.translations(request)
        rows = (
            [self.call.input_ids[0]]
            if translations is None
            else [translation.fixed[:-1] for translation in translations]
        )
        return max(map(len, rows)) <= limit

    @cached_property
    def device(self) -> torch.device:
        """Device of the call's inputs."""
        return compat.input_device(self.model) if self._call is None else self._call.input_ids.device

    def costs(self, request: Request) -> StepCosts | None:
        """Costs of the target's forwards, where the method drafts as many tokens as save time."""
        config = request.config
        if not config.fits_costs:
            return None
        is_static = self._call is not None and self.has_static_cache
        return state_of(self.model).step_costs(
            self.model, self.device, is_fixed=config.is_deterministic, is_static=is_static
        )
