"""A model class for lm-evaluation-harness: `--model hf-specdec`, with the scores of `--model hf`.

    python -m hf_specdec.tools.integrations.lm_eval run --model hf-specdec --model_args pretrained=gpt2 ...

From Python import this module before `lm_eval.simple_evaluate(model="hf-specdec", ...)`.
"""

from functools import partial
from typing import Any

import torch

from hf_specdec.api.enable import enable
from hf_specdec.call.arguments import AUTO
from hf_specdec.call.checks import check_settings
from hf_specdec.call.request import Request
from hf_specdec.compat.models import generation_model
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sampling.per_row import PerRow
from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.loading.auto import AutoModelForCausalLM
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers
from hf_specdec.loading.drafts import AutoDraftHead, is_draft_head
from hf_specdec.methods.registry import config_arguments

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import MultiTokenEOSCriteria
except ImportError as error:
    raise MissingExtraError("lm_eval", "lm-eval", "The model class for lm-evaluation-harness") from error


@register_model("hf-specdec")
class SpecHFLM(HFLM):
    """`HFLM` that generates with speculative decoding; likelihoods are computed as by `HFLM`.

    Args:
        pretrained: a model, a folder, or a name on the hub.
        draft_model (`str`, *optional*): folder or name of a draft model or a draft head, for the methods that take one.
        kwargs: everything that `HFLM` takes; `spec_method` (by default the method of a list form, or that of the
            model's generation configuration, or `"auto"`), `spec_config`, `lookahead_config` and the other list forms,
            as for `generate`.
    """

    def __init__(self, pretrained: Any, draft_model: str | None = None, **kwargs: Any) -> None:
        names = ("spec_method", "spec_config", *config_arguments())
        method_kwargs = {name: kwargs.pop(name) for name in names if name in kwargs}
        super().__init__(pretrained, **kwargs)
        enable(self.model)
        self._method_kwargs = {"spec_method": AUTO, **method_kwargs}
        self._is_default = not method_kwargs  # the method then yields where a task asks for beams or the like
        if draft_model is not None:
            self._method_kwargs |= self._draft(draft_model)

    def _draft(self, path: str) -> dict[str, Any]:
        """Arguments of `generate` for a draft model or a draft head, in the target's dtype."""
        draft: Any
        if is_draft_head(path):
            draft = AutoDraftHead.from_pretrained(path, target=self.model, dtype=self.model.dtype)
        else:
            device_map = {"": str(self.device)}
            draft = AutoModelForCausalLM.from_pretrained(path, dtype=self.model.dtype, device_map=device_map)
        return {"assistant_model": draft, **draft_tokenizers(draft, path, self.tokenizer)}

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        """Continue `(batch, length)` ids; each row ends at a stop sequence of its own.

        The base class lets rows run on until all have met one, and cuts the texts at it afterwards.
        """
        if self._is_default and (reason := self._reason_against(kwargs)) is not None:
            state_of(generation_model(self.model)).warn_once(f"A task is decoded without speculation: {reason}")
            plain: torch.Tensor = super()._model_generate(context, max_length, stop, **kwargs)
            return plain
        temperature = kwargs.setdefault("temperature", 0.0)
        if temperature == 0.0:
            kwargs.setdefault("do_sample", False)
            if not kwargs["do_sample"]:
                del kwargs["temperature"]
        criteria = [PerRow(partial(self._criterion, text, context.shape[1])) for text in stop]
        enabled = self.mixed_precision_dtype is not None
        with torch.autocast(device_type=self.device.type, dtype=self.mixed_precision_dtype, enabled=enabled):
            output: torch.Tensor = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **kwargs,
                **self._method_kwargs,
            )
        return output

    def _reason_against(self, kwargs: dict[str, Any]) -> str | None:
        """Reason why a task's settings have no speculative form, or `None`."""
        try:
            check_settings(Request.of(generation_model(self.model), kwargs))
        except ConfigError as error:
            return str(error)
        return None

    def _criterion(self, text: str, prompt_length: int, row: int) -> MultiTokenEOSCriteria:
        """The harness's criterion for one row."""
        return MultiTokenEOSCriteria(text, self.tokenizer, prompt_length, 1)


if __name__ == "__main__":
    cli_evaluate()
