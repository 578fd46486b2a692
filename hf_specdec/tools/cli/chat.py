"""`hf-specdec chat`: a chat in the terminal, with the cache and what the method learned kept between turns."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.spread import spread


@spread
def chat(
    *,
    loading: LoadOptions,
    system: Annotated[str | None, typer.Option(help="The system's message, before the chat.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file. Default: the template of the model's tokenizer.")
    ] = None,
    method: MethodOptions,
    max_new_tokens: options.MaxNewTokens = 512,
    sampling: SamplingOptions,
    seed: options.Seed = None,
) -> None:
    """Chat with a model in the terminal."""
    kwargs = {"max_new_tokens": max_new_tokens, **sampling.kwargs}
    template = None if chat_template is None else chat_template.read_text("utf-8")

    import torch

    from hf_specdec.tools.cli.conversation import Conversation, converse
    from hf_specdec.tools.cli.models import load

    loaded, method_kwargs = load(loading, method)
    loaded.tokenizer.chat_template = template or getattr(loaded.tokenizer, "chat_template", None)
    if loaded.tokenizer.chat_template is None:
        remedy = "Name an instruction-tuned model, or give a template with --chat-template."
        raise ConfigError("model", "must have a chat template", loaded.name, remedy)
    if seed is not None:
        torch.manual_seed(seed)
    converse(Conversation(loaded, kwargs | method_kwargs, system))
