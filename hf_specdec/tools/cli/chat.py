"""`hf-specdec chat`: a chat in the terminal, with the cache and what the method learned kept between turns."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from hf_specdec.api.enable import capability
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.common.files import lone_surrogate, read_text
from hf_specdec.common.observer import SpecStep
from hf_specdec.compat import CACHE, crop_to, input_device, max_positions, takes_cache
from hf_specdec.compat.state_layers import forgets_states
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError, SpecError, counted
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.inputs import check_seed
from hf_specdec.tools.cli.memory import open_memory, remembering
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.report import drafts_line
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.serve.text_stream import TextStream

HELP = (
    "!clear begins anew, !stats says how the last answer came about, !help shows this, !exit or Ctrl-D ends; "
    "Ctrl-C ends an answer"
)
GREEN, RESET = "\x1b[32m", "\x1b[0m"


@spread
def chat(
    *,
    model: options.ModelPath = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the chat.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file. Default: the template of the model's tokenizer.")
    ] = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Show accepted drafts in green.")] = False,
    choice: MethodOptions,
    spec_memory: options.SpecMemoryFile = None,
    max_new_tokens: options.MaxNewTokens = 512,
    sampling: SamplingOptions,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
) -> None:
    """Chat with a model in the terminal."""
    method, config = choice.read(model, memory=spec_memory)
    drawn = sampling.read()
    check_seed(seed)
    kept = open_memory(spec_memory)
    target = loading.load(model, dtype, config)
    _set_template(target.tokenizer, chat_template)
    how = choice.arguments(method, config, dtype, target)
    if seed is not None:
        torch.manual_seed(seed)
    told = {"max_new_tokens": max_new_tokens, **drawn, **how}
    talk = _Chat(target.model, target.tokenizer, told, system, show_drafts)
    try:
        written = talk.text_of("Hello")  # a template that refuses it is told before anything is typed
        if not written.strip():
            raise ConfigError("chat_template", "must write a message", written, "It writes nothing.")
    except ConfigError as error:
        option, value = ("--chat-template", str(chat_template)) if chat_template else ("--model", model)
        raise ConfigError(option, "must have a template that takes a message", value, error.remedy) from error
    with remembering(target.model, kept):
        _converse(talk)


def _set_template(tokenizer: Any, file: Path | None) -> None:
    if file is not None:
        if not file.is_file():
            raise ConfigError("--chat-template", "must be an existing file", str(file), "Check the spelling.")
        tokenizer.chat_template = read_text(file, "--chat-template")
    if getattr(tokenizer, "chat_template", None) is None:
        remedy = "Name an instruction-tuned model, or give a template with --chat-template."
        raise ConfigError("--model", "must have a chat template", tokenizer.name_or_path, remedy)


def _converse(talk: "_Chat") -> None:
    """Read lines until they end. In a terminal the chat goes on after an error."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a message with other bytes is an error of its own
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - keys that edit the line, and the lines before
    note(HELP, "dim")
    while (line := _typed() if is_terminal else sys.stdin.readline()) and (said := line.strip()) != "!exit":
        if said == "!clear":
            talk.clear()
        elif said == "!stats":
            note(talk.describe_last(), "dim")
        elif said == "!help":
            note(HELP, "dim")
        elif said.startswith("!"):
            note(f"unknown command {said}; {HELP}", "yellow")
        elif said:
            try:
                talk.answer(said)
            except (SpecError, ValueError) as error:
                if not is_terminal:
                    raise
                note(f"error: {' '.join(str(error).split())}", "red")


def _typed() -> str:
    """The next line that is typed; empty where there will be none."""
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return "\n"


class _Chat:
    """The messages so far, and the cache of the tokens that the model has read.

    Args:
        options: arguments of `generate`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, options: dict[str, Any], system: str | None, show_drafts: bool
    ) -> None:
        self.model, self.tokenizer, self.options, self.show_drafts = model, tokenizer, options, show_drafts
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.stats: Any = None
        self.num_reused = 0  # tokens of the last prompt that were not read again
        self.messages = list(self._first)
        self._takes_cache = takes_cache(model)
        self._cache, self._cached = self._new_cache(), list[int]()

    def clear(self) -> None:
        """Begin anew."""
        self.messages = list(self._first)
        self._forget_cache()

    def text_of(self, said: str) -> str:
        """The chat with a new message, as the template writes it."""
        return chat_text(self.tokenizer, [*self.messages, {"role": "user", "content": said}])

    def answer(self, said: str) -> None:
        """Write the answer to stdout as it comes; Ctrl-C ends it, and what has been written stays.

        Raises:
            ConfigError: the message is no text, the template refuses the chat, or the model has no positions for it.
        """
        if (place := lone_surrogate(said)) is not None:
            rule = "must be Unicode text, without bytes that are no UTF-8"
            raise ConfigError("message", rule, said[: place + 1], "Type it again.")
        told = self.text_of(said)
        ids = self.tokenizer(told, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
        max_new_tokens = self._room(ids.shape[1])
        self._keep_beginning_of(ids[0, :-1].tolist())
        self.num_reused = len(self._cached)
        drafts = self.show_drafts and "spec_method" in self.options and capability(self.model).tier != "plain"
        shown = _Shown(self.tokenizer, waits=drafts)
        watched = {"spec_observer": shown.on_step} if drafts else {}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        device = input_device(self.model)
        try:
            output = self.model.generate(
                **{name: tensor.to(device) for name, tensor in inputs.items()},
                **{**self.options, **watched, **self._kept(), "max_new_tokens": max_new_tokens},
                streamer=shown,
                return_dict_in_generate=True,
            )
        except KeyboardInterrupt:
            shown.end()  # which transformers' own loop leaves out
            self.stats = None
            self._forget_cache()
        except BaseException:
            self._forget_cache()
            raise
        else:
            self.stats = getattr(output, "spec_stats", None)
            if self._takes_cache:
                self._keep(output)
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": shown.text}]

    def describe_last(self) -> str:
        """Statistics of the last answer, in words."""
        if self.stats is None:
            return "there is no answer with drafts yet"
        reused = f"the cache held {counted(self.num_reused, 'token')} of the prompt"
        return f"{drafts_line(self.stats)}; {reused}"

    def _room(self, length: int) -> int:
        """New tokens after `length` tokens: as many as were asked for, or the model has positions for."""
        wanted, positions = int(self.options["max_new_tokens"]), max_positions(self.model.config)
        if positions is None:
            return wanted
        if length >= positions:
            rule = f"must be shorter than the model's {positions} positions"
            raise ConfigError("chat", rule, f"{length} tokens", "!clear begins anew.")
        return min(wanted, positions - length)

    def _kept(self) -> dict[str, Any]:
        """Arguments of `generate` for the cache, whatever kind the model's generation configuration asks for."""
        return {CACHE: self._cache, "cache_implementation": None} if self._takes_cache else {}

    def _new_cache(self) -> Any:
        return DynamicCache(config=self.model.config) if self._takes_cache else None

    def _keep(self, output: Any) -> None:
        """Keep the cache, where it holds the text alone (XLM's has a mask token too) and many tokens may follow."""
        self._cache, text = output[CACHE], output.sequences[0].tolist()
        length = self._cache.get_seq_length()
        self._cached = text[:length]
        is_left = length < len(text)  # the last token of the text, which is never read
        tier = state_of(self.model).findings.of(self.model).capability.tier
        if not is_left or tier == "plain" or forgets_states(self.model):
            self._forget_cache()

    def _keep_beginning_of(self, token_ids: list[int]) -> None:
        """Keep in the cache the tokens that a text begins with; none where the cache cannot be cut."""
        same = [cached == token for cached, token in zip(self._cached, token_ids, strict=False)]
        common = len(same) if all(same) else same.index(False)
        if common < len(self._cached) and not crop_to(self._cache, common):
            self._forget_cache()
        self._cached = self._cached[:common]

    def _forget_cache(self) -> None:
        self._cache, self._cached = self._new_cache(), []


class _Shown:
    """Writes an answer to stdout: a transformers streamer, and an observer of steps where drafts are shown."""

    def __init__(self, tokenizer: Any, *, waits: bool) -> None:
        self._stream, self._has_prompt, self._has_ended = TextStream(tokenizer), False, False
        self._waits, self._waiting = waits, list[int]()  # for the step that tells which are drafted
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """New tokens; the first are the prompt's."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._waiting += value.flatten().tolist()
        if not self._waits:
            self._write_waiting()

    def on_step(self, step: SpecStep) -> None:
        """The tokens of a verify step, all but the last of them drafted."""
        count = len(step.accepted)
        self._write(self._waiting[:-count], "")  # before the first step: the token that the prompt gave
        self._write(self._waiting[-count:-1], GREEN)
        self._write(self._waiting[-1:], "")
        self._waiting.clear()

    def end(self) -> None:
        """The answer has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        self._write_waiting()
        self._print(self._stream.end(), "")

    def _write_waiting(self) -> None:
        self._write(self._waiting, "")
        self._waiting.clear()

    def _write(self, token_ids: list[int], colour: str) -> None:
        self._print(self._stream.push(token_ids) if token_ids else "", colour)

    def _print(self, piece: str, colour: str) -> None:
        self.text += piece
        if piece:
            sys.stdout.write(f"{colour}{piece}{RESET}" if colour else piece)
            sys.stdout.flush()
