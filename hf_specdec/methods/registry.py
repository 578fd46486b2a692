"""The methods by name.

method = resolve("ngram")                       # the entry of "prompt_lookup"
drafter = method.make(method.config_class(), DrafterContext(MethodState()))
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from transformers import PreTrainedModel

from hf_specdec.compat import attention_implementation
from hf_specdec.errors import unknown_name
from hf_specdec.methods.auto.method import AUTO
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.method import Method
from hf_specdec.methods.dflash.method import DFLASH
from hf_specdec.methods.draft_model.gemma4_assistant import gemma_assistant_head_of
from hf_specdec.methods.draft_model.method import DRAFT_MODEL
from hf_specdec.methods.eagle3.method import EAGLE3
from hf_specdec.methods.lookahead.method import LOOKAHEAD
from hf_specdec.methods.mtp.method import MTP
from hf_specdec.methods.plain.method import PLAIN
from hf_specdec.methods.prompt_lookup.method import PROMPT_LOOKUP

ATTRIBUTE = "_hf_specdec_head"  # of a transformers model: the head that it is
METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (PLAIN, PROMPT_LOOKUP, LOOKAHEAD, DRAFT_MODEL, EAGLE3, MTP, DFLASH, AUTO)}
)


def resolve(name: str) -> Method:
    """The method called `name`, by its name or an alias.

    Raises:
        ConfigError: there is none; the error names the nearest match.
    """
    for method in METHODS.values():
        if name == method.name or name in method.aliases:
            return method
    raise unknown_name("spec_method", name, ["none", *(n for m in METHODS.values() for n in (m.name, *m.aliases))])


def config_arguments() -> dict[str, Method]:
    """Arguments of `generate` that carry a configuration, and the method each belongs to."""
    return {argument: method for method in METHODS.values() for argument in method.config_arguments}


def as_head(assistant: object) -> DraftHead | None:
    """The draft head that `assistant` is, be it one of ours or a transformers model; `None` of any other object."""
    if isinstance(assistant, DraftHead):
        return assistant
    if not isinstance(assistant, PreTrainedModel):
        return None
    made_for = (assistant.dtype, assistant.device, attention_implementation(assistant.config))
    kept = vars(assistant).get(ATTRIBUTE)
    if kept is not None and kept[0] == made_for:
        return cast("DraftHead", kept[1])
    for wrap in (gemma_assistant_head_of, *[method.as_head for method in METHODS.values()]):
        if wrap is not None and (head := wrap(assistant)) is not None:
            vars(assistant)[ATTRIBUTE] = made_for, head  # what was compiled for it serves later calls
            return head
    return None
