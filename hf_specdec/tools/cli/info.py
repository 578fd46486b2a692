"""`hf-specdec info`: what a model can do here."""

import platform
from importlib import metadata
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.call.arguments import AUTO, read_prompt_request
from hf_specdec.call.facts import Facts
from hf_specdec.call.plan import plan_model
from hf_specdec.compat import attention_implementation
from hf_specdec.distributed.placement import available_devices, where_it_lies
from hf_specdec.engine.draft_pairing import draft_capability, vocab_sizes
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.errors import SpecError
from hf_specdec.kernels import cpu, native
from hf_specdec.kernels.quantization.precision import machine_support
from hf_specdec.kernels.quantization.weights import num_parameters, parameter_bytes, precision_of
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import METHODS
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.inputs import load_draft
from hf_specdec.tools.cli.options import LoadOptions
from hf_specdec.tools.cli.report import print_facts, print_json
from hf_specdec.tools.cli.spread import spread

PACKAGES = ("hf_specdec", "torch", "transformers", "accelerate")


@spread
def info(
    *,
    model: options.ModelPath = None,
    draft_model: options.DraftModelPath = None,
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = None,
    loading: LoadOptions,
    json: options.Json = False,
) -> None:
    """Say what a model can do on this machine and why.

    With a draft model or head, also whether the two go together.
    """
    target = loading.load(model, dtype)
    loaded = target.model
    groups: dict[str, dict[str, Any]] = {
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "machine": _machine(),
        "model": _model(loaded),
        "capability": hf_specdec.capability(loaded).to_dict(),
        "plan": _plan(loaded, json=json),
    }
    if model is None or draft_model is not None:
        draft = load_draft(draft_model, draft_dtype or dtype, None)
        if isinstance(draft, DraftHead):
            groups |= {"draft head": _head(draft), "pair": _head_pair(loaded, draft)}
        else:
            translates = bool(draft_tokenizers(draft, draft_model, target.tokenizer))
            groups |= {"draft model": _model(draft), "pair": _pair(loaded, draft, translates=translates)}
    aliases = {method.name: list(method.aliases) for method in METHODS.values()}
    if json:
        print_json({**groups, "methods": aliases})
    else:
        methods = {
            name: "; ".join(filter(None, [f"also {', '.join(others)}" if others else "", METHODS[name].summary]))
            for name, others in aliases.items()
        }
        precisions = {one.precision: f"{'yes' if one.works else 'no'}: {one.reason}" for one in machine_support()}
        groups |= {"precisions": precisions}
        print_facts([*groups.items(), ("methods", methods)])


def _plan(model: PreTrainedModel, *, json: bool) -> dict[str, Any]:
    """Plan of a call with one prompt and the method that the model has by default."""
    plan = plan_model(Facts(model), read_prompt_request(model, {"spec_method": AUTO}))
    return plan.to_dict() if json else plan.lines()


def _machine() -> dict[str, Any]:
    reason = cpu.why_unused()
    where = f"torch's: {reason}" if reason else "of a few tokens in the compiled core, where it is faster"
    return {
        "devices": list(map(str, available_devices())),
        "threads": torch.get_num_threads(),
        "drafting": "n-grams in Python: no compiled core is installed"
        if native.core is None
        else "in the compiled core",
        "linear layers": where,
        "norms": where,
        "attention": where,
    }


def _model(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "path": model.config.name_or_path,
        "architecture": type(model).__name__,
        "parameters": num_parameters(model),
        "dtype": precision_of(model),
        "bytes": parameter_bytes(model),
        "devices": where_it_lies(model),
        "attention": attention_implementation(model.config),
    }


def _head(head: DraftHead) -> dict[str, Any]:
    return {
        "path": head.name_or_path,
        "architecture": type(head).__name__,
        "parameters": num_parameters(head),
        "dtype": precision_of(head),
        "methods": list(head.methods),
    }


def _head_pair(target: PreTrainedModel, head: DraftHead) -> dict[str, Any]:
    """Fit of a head to the target, and the hidden states that it reads."""
    try:
        return {"goes together": True, "reason": "their sizes agree", "hidden states": list(check_head(target, head))}
    except SpecError as error:
        return {"goes together": False, "reason": str(error)}


def _pair(target: PreTrainedModel, draft: PreTrainedModel, *, translates: bool) -> dict[str, Any]:
    """Fit of a draft to the target, and the tiers of both."""
    try:
        draft_capability(target, draft, translates=translates)
        reason = None
    except SpecError as error:
        reason = str(error)
    sizes = vocab_sizes(target, draft)
    agrees = "drafts are translated between the tokenizers" if translates else "the vocabularies agree"
    return {
        "goes together": reason is None,
        "reason": reason or f"{agrees}, and the draft can roll back",
        "vocabularies": sizes,
        "tiers": [hf_specdec.capability(model).tier for model in (target, draft)],
    }
