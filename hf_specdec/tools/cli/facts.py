"""Facts about a machine and a model, for `hf-specdec info`; values of JSON or for people."""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.api.enable import capability
from hf_specdec.call.arguments import AUTO, read_prompt_request
from hf_specdec.call.plan import plan_model
from hf_specdec.compat.attention import attention_implementation
from hf_specdec.distributed.placement import available_devices, where_it_lies
from hf_specdec.engine.draft_pairing import draft_capability
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.errors import SpecError
from hf_specdec.kernels import cpu, native
from hf_specdec.kernels.quantization.precision import machine_support
from hf_specdec.kernels.quantization.weights import num_parameters, parameter_bytes, precision_of
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import METHODS

PACKAGES = ("hf_specdec", "torch", "transformers", "accelerate")


def facts_of(model: PreTrainedModel, kwargs: Mapping[str, Any], *, as_json: bool) -> dict[str, dict[str, Any]]:
    """Groups of facts on a model and on the draft model or head that `kwargs` of `generate` bring, if they do."""
    plan = plan_model(read_prompt_request(model, {"spec_method": AUTO}))
    groups: dict[str, dict[str, Any]] = {
        **_machine(),
        "model": _model(model),
        "capability": capability(model).to_dict(),
        "plan": plan.to_dict() if as_json else plan.lines(),
        **(_pair(model, kwargs) if "assistant_model" in kwargs else {}),
    }
    aliases = {method.name: list(method.aliases) for method in METHODS.values()}
    if as_json:
        return {**groups, "methods": aliases}
    methods = {
        name: "; ".join([*(f"also {alias}" for alias in aliases[name]), method.summary])
        for name, method in METHODS.items()
    }
    precisions = {it.precision: f"{'yes' if it.works else 'no'}: {it.reason}" for it in machine_support()}
    return {**groups, "methods": methods, "precisions": precisions}


def _machine() -> dict[str, dict[str, Any]]:
    """Versions of packages, devices, and what the compiled core computes."""
    reason = cpu.why_unused()
    return {
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "machine": {
            "devices": list(map(str, available_devices())),
            "threads": torch.get_num_threads(),
            "drafting": "in the compiled core" if native.core is not None else "n-grams in Python: no core",
            "layers": f"torch's: {reason}" if reason else "of a few tokens in the compiled core, where it is faster",
        },
    }


def _model(model: Any) -> dict[str, Any]:
    """A model, or a draft head."""
    facts: dict[str, Any] = {
        "path": model.name_or_path,
        "architecture": type(model).__name__,
        "parameters": num_parameters(model),
        "dtype": precision_of(model),
        "bytes": parameter_bytes(model),
    }
    if isinstance(model, DraftHead):
        return {**facts, "methods": list(model.methods)}
    return {**facts, "devices": where_it_lies(model), "attention": attention_implementation(model.config)}


def _pair(target: PreTrainedModel, kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A draft model or head, and whether it goes together with the target."""
    draft, translates = kwargs["assistant_model"], "assistant_tokenizer" in kwargs
    reason = f"drafts are {'translated between the tokenizers' if translates else 'tokens of the target'}"
    verdict: dict[str, Any] = {"goes together": True, "reason": reason}
    try:
        if isinstance(draft, DraftHead):
            verdict["hidden states"] = list(check_head(target, draft))
        else:
            draft_capability(target, draft, translates=translates)
    except SpecError as error:
        verdict = {"goes together": False, "reason": str(error)}
    return {"assistant model": _model(draft), "pair": verdict}
