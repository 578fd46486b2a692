"""`hf-specdec generate`: continue a prompt or a file of prompts, or compare ways to continue one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note

BATCH_SIZE = 8
COMPARE = "Then measure the method, plain generate, and transformers' prompt lookup or assisted generation."


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyOptions:
    """A file of prompts and that of its results.

    Attributes:
        prompts_file (`Path`): A .jsonl file (.gz too) of prompts: a string a line, or an object with prompt or text,
            or for a chat with messages, turns, instruction or question. Needs --out.
        out (`Path`): With --prompts-file: the .jsonl file of results. The same command goes on where it was
            interrupted.
        batch_size (`int`): With --prompts-file: prompts decoded together. Default: 8.
    """

    prompts_file: Path | None = None
    out: Path | None = None
    batch_size: options.AtLeastOne = None

    def check(self, **others: str | bool | None) -> None:
        """Refuse options that do not go with a file of prompts, or that need one."""
        if (self.prompts_file is None) != (self.out is None):
            name, other = ("out", "prompts_file") if self.out is None else ("prompts_file", "out")
            raise ConfigError(name, f"must be given with {other}", None, "Add --prompts-file and --out.")
        if self.prompts_file is None and self.batch_size is not None:
            raise ConfigError("batch_size", "must come with prompts_file", self.batch_size, "Add --prompts-file.")
        for name, value in others.items():
            if self.prompts_file is not None and value:
                remedy = 'A chat is a line with "question" or "messages"; `hf-specdec bench` compares over files.'
                raise ConfigError(name, "must be unset with prompts_file", value, remedy)


@spread
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; `-` reads stdin. Default: piped stdin, else a built-in one."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: it goes through the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system's message.")] = None,
    loading: LoadOptions,
    method: MethodOptions,
    max_new_tokens: options.MaxNewTokens = 128,
    sampling: SamplingOptions,
    seed: options.Seed = None,
    many: ManyOptions,
    compare: Annotated[bool, typer.Option("--compare", help=COMPARE)] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --compare: timed rounds after the warm-up.")] = 3,
    json: options.Json = False,
) -> None:
    """Continue a prompt with speculative decoding.

    The exit code is 1 if, with --compare, the method's text differs from plain generate's in fp32, or if a prompt of
    --prompts-file failed, and 130 if it is interrupted, which leaves --compare the complete rounds. `accelerate launch`
    and torchrun share a file's prompts out, with a file of results for each process.
    """
    many.check(prompt=prompt, compare=compare, chat=chat, json=json)
    if system is not None and not chat:
        raise ConfigError("system", "must come with chat", system, "Add --chat.")
    kwargs = {"max_new_tokens": max_new_tokens, **sampling.kwargs}

    from hf_specdec.tools.cli import job as jobs  # and with it torch
    from hf_specdec.tools.cli import processes
    from hf_specdec.tools.cli.models import load
    from hf_specdec.tools.cli.prompts_file import generate_file

    text = None if many.prompts_file is not None else jobs.read_prompt(prompt)
    device = processes.process_device() if many.prompts_file is not None else None
    loaded, method_kwargs = load(loading, method, device=device)
    job = jobs.Job(loaded, method_kwargs, kwargs, seed)
    if many.prompts_file is not None and many.out is not None:
        generate_file(job, many.prompts_file, many.out, many.batch_size or BATCH_SIZE)
        return
    prompts = jobs.make_prompts(text, loaded.tokenizer, is_chat=chat, system=system)
    if text is None and not json:
        note(prompts[0].text, "dim")
    if compare:
        from hf_specdec.tools.cli.measured import compare_and_print

        compare_and_print(job, prompts, rounds, as_json=json)
    elif json:
        job.print_document(prompts[0])
    else:
        job.show(prompts[0])
