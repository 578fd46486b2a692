"""Everything that is measured on a GPU, by one command: what a step costs, and the 1B and 7B shapes.

    python -m hf_specdec.tools.bench.gpu --output gpu.json --figures --max-minutes 12
    python -m hf_specdec.tools.bench.gpu --output gpu.json
    python -m hf_specdec.tools.bench.gpu --output part.json --shape 7B --batch 1 --context-length 512 --row "auto*"
    python -m hf_specdec.tools.bench.gpu --output tiny.json --shape tiny       # tries the same on a CPU

The embedded target is widened to each shape, so text and acceptance are real and the cost is that of the shape. Writes
one JSON document, and its tables as Markdown next to it, after each row. The same command again goes on where the
document ends: rows that were left out are tried again.

Needs torch with CUDA and Triton, which comes with it, and no network. SmolLM2 is measured where `hf-specdec fetch
smollm2` has put it into the user's cache (`XDG_CACHE_HOME`), economize and flashspec where an interpreter has them:
that of `--peer-python`, or this one, with `PYTHONPATH=peers` too. What is not there is left out and named.

    pip install --no-deps --target peers economize==0.3.2 flashspec==0.3.1     # 4 MB, to be carried; needs pydantic
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from hf_specdec.errors import ConfigError, first_line, unknown_name
from hf_specdec.loading import embedded
from hf_specdec.loading.published import is_fetched
from hf_specdec.tools.bench.document import Document, add_table, check_document_file, load_document, write_document
from hf_specdec.tools.bench.gpu_cells import LATE, ONE_TOKEN, free_memory, is_out_of_memory, measured_cell
from hf_specdec.tools.bench.gpu_peers import names_peers, with_peers
from hf_specdec.tools.bench.gpu_shapes import SHAPES, Selection, Shape, figures_of
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model, pick_device
from hf_specdec.tools.bench.measure import synchronize
from hf_specdec.tools.bench.peers.process import read_pythons
from hf_specdec.tools.bench.prompts import default_prompts, spread
from hf_specdec.tools.bench.steps import fill_steps
from hf_specdec.tools.bench.tables import markdown
from hf_specdec.tools.command_errors import run_program

CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
Backend = Literal["math", "flash_attention", "efficient_attention", "cudnn_attention"]
COPIED_BYTES, NUM_COPIES = 1 << 30, 20
COLUMNS = {
    "row": "{name}",
    "batch": "{batch}",
    "context": "{context}",
    "tokens/s": "{tokens_per_second:.1f}",
    "over plain": "{over_plain:.2f}",
    "over theirs": "{over_theirs:.2f}",
    "tokens a step": "{mean_acceptance_length:.2f}",
    "a later token": "{later_token_ms:.2f} ms",
    "first call": "{first_call_seconds:.1f} s",
    "graphs": "{num_graphs:d}",
    "peak memory": "{peak_gigabytes:.1f} GB",
    "equal": "{equal}",
}
LEFT_OUT = {"left out": "{name}", "batch": "{batch:d}", "context": "{context:d}", "reason": "{reason}"}
KERNELS = {"kernel": "{name}", "runs": "{count}", "ms": "{ms:.2f}", "share": "{share:.0%}"}

Keep = Callable[[Document], None]
Parts = Sequence[tuple[str, Selection]]  # shapes, and what is measured of each


def measure_gpu(
    parts: Parts,
    *,
    device: str | None = None,
    earlier: Document | None = None,
    max_minutes: float = math.inf,
    keep: Keep = lambda document: None,
    pythons: Mapping[str, str] | None = None,
) -> Document:
    """Measure tables of each shape.

    Args:
        parts: names of `SHAPES`, and the part of each that is measured; a shape is loaded once for those in a row.
        earlier: a document whose rows are kept, where it has the same settings and is not complete.
        max_minutes: after which no row begins.
        keep (*optional*): gets the document so far after each row and each shape.
        pythons: interpreters that have other libraries, by library; this one by default.
    """
    end, names = time.monotonic() + 60.0 * max_minutes, list(dict.fromkeys(name for name, _ in parts))
    for name in names:
        if name not in SHAPES:
            raise unknown_name("shape", name, SHAPES)
    where, chosen = pick_device(device), parts[0][1]
    _check_compile_options(chosen)
    if device is None and where.type == "cpu" and (large := [name for name in names if SHAPES[name].size is not None]):
        remedy = "Try it with the shape tiny (make gpu SHAPES=tiny), or name the device cpu to measure on the CPU."
        raise ConfigError("shape", "must be tiny where there is no accelerator", ", ".join(large), remedy)
    settings: dict[str, Any] = {"shapes": names, "compile_mode": chosen.compile_mode}
    settings |= {"compile_options": dict(chosen.compile_options), "sdpa_backend": chosen.sdpa_backend}
    if earlier is not None and earlier["settings"] == settings and not earlier["is_complete"]:
        document = earlier
    else:
        bandwidth = _copy_bandwidth(where)
        document = new_document("gpu", where, settings=settings) | {"copy_bandwidth": bandwidth}
        document["notes"].append(f"Copy bandwidth of the device: {bandwidth / 1e9:.0f} GB/s.")
    for name in names:
        _table(document, name, COLUMNS)
        _table(document, f"{name}, left out", LEFT_OUT).clear()
    groups = [(name, list(group)) for name, group in itertools.groupby(parts, key=lambda part: part[0])]
    for number, (name, group) in enumerate(groups, start=1):
        _measure_shape(name, document, where, [selection for _, selection in group], end, keep, pythons or {})
        free_memory(where)
        late = any(
            row["reason"].startswith(LATE) for table in document["tables"] for row in table["rows"] if "reason" in row
        )
        document["is_complete"] = number == len(groups) and not late
        keep(document)
    return document


def _check_compile_options(chosen: Selection) -> None:
    if not chosen.compile_options:
        return
    options = dict(chosen.compile_options)
    if chosen.compile_mode:
        raise ConfigError("compile_option", "must be left out next to a mode", options, "A mode is a set of options.")
    try:
        torch.compile(_copy_bandwidth, options=options)  # compiles nothing before it is called
    except (RuntimeError, AttributeError) as error:
        rule = "must be an option of inductor with a value of its type"
        raise ConfigError("compile_option", rule, options, f"{first_line(error).split(', known')[0]}.") from error


def _table(document: Document, title: str, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the table with this title, added where there is none."""
    known: list[list[dict[str, Any]]] = [one["rows"] for one in document["tables"] if one["title"] == title]
    return known[0] if known else add_table(document, title, columns)


def _measure_shape(
    name: str,
    document: Document,
    where: torch.device,
    selections: Sequence[Selection],
    end: float,
    keep: Keep,
    pythons: Mapping[str, str],
) -> None:
    """Add the tables of one shape and its model; what has no room, or no time, is in a table of its own."""
    shape, stage = SHAPES[name], "loading the model"
    contexts = [context for chosen in selections for context in chosen.contexts or shape.contexts]
    rows, left_out = _table(document, name, COLUMNS), _table(document, f"{name}, left out", LEFT_OUT)
    try:
        if shape.model is not None and not is_fetched(shape.model):
            left_out.append({"name": stage, "reason": f"hf-specdec fetch {shape.model} has not been called"})
            return
        head = shape.head or embedded.path("head")
        loaded = load_model(path=shape.model, dtype=shape.dtype, head=head, widen_to=shape.size, device=where)
        longest = max(contexts) + shape.max_new_tokens + 256
        for model in (loaded.model, loaded.assistant):
            if model is not None:  # the text beyond is worse, its cost the same
                model.config.max_position_embeddings = max(model.config.max_position_embeddings, longest)
        if (facts := model_facts(loaded)) not in document["models"]:
            document["models"].append(facts)
        for chosen in selections:
            peers = with_peers(loaded, pythons) if names_peers(chosen.rows) else nullcontext(loaded)
            cells = itertools.product(chosen.batches or shape.batches, chosen.contexts or shape.contexts)
            with peers as compared:
                for batch, context in cells:
                    for row in measured_cell(shape, compared, chosen, batch, context, rows, end):
                        if "profile" in row:
                            _add_profile(document, name, row, row.pop("profile"))
                        (left_out if "reason" in row else rows).append(row)
                        keep(document)
        share = _bandwidth_share(loaded, rows, document["copy_bandwidth"])
        if share is not None:
            note = f"{name}: plain decoding at one token reads its weights at {share:.0%} of it."
            document["notes"] = [*dict.fromkeys([*document["notes"], note])]
        if where.type == "cuda" and find_spec("triton") is not None:
            left_out += _add_products(document, name, shape, where)
            keep(document)
        stage = "what a step costs"
        if (chosen := selections[0]).steps:
            prompts = spread(default_prompts(), chosen.num_prompts)
            fill_steps(document, loaded, prompts, max_new_tokens=min(shape.max_new_tokens, 64))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        left_out.append({"name": stage, "reason": first_line(error)})


def _add_products(document: Document, name: str, shape: Shape, where: torch.device) -> list[dict[str, Any]]:
    """Add a table of single matrix products once; returns why there is none, as a row that is left out."""
    title = f"{name}, share of the copy bandwidth"
    if any(table["title"] == title for table in document["tables"]):
        return []
    try:
        from hf_specdec.tools.bench import gpu_products  # which needs Triton

        found = list(gpu_products.measure_products(shape, document["copy_bandwidth"], where))
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways
        return [{"name": "matrix products", "reason": first_line(error)}]
    _table(document, title, gpu_products.COLUMNS)[:] = found
    return []


def _add_profile(document: Document, shape: str, row: Mapping[str, Any], call: Mapping[str, Any]) -> None:
    """Add a table of where the device's time of one call goes."""
    busy = call["device_seconds"]
    where = f"{shape}, {row['name']}, {row['batch']} x {row['context']}"
    table = add_table(document, f"{where}: the device works {busy / call['seconds']:.0%}", KERNELS)
    table += [{**one, "ms": 1000 * one["seconds"], "share": one["seconds"] / busy} for one in call["kernels"]]


def _bandwidth_share(loaded: LoadedModel, rows: Sequence[Mapping[str, Any]], bandwidth: float) -> float | None:
    """Share of the copy bandwidth that reading the weights once a token takes: the fastest row of one token a step.

    Tokens after the first: without the prompt's forward.
    """
    size: int = sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
    plain = [row for row in rows if row["batch"] == 1 and row["name"].startswith(("plain", ONE_TOKEN))]
    seconds = [row["later_token_ms"] / 1000 for row in plain if row["later_token_ms"]]
    return size / min(seconds) / bandwidth if seconds else None


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    size = COPIED_BYTES if device.type == "cuda" else COPIED_BYTES >> 5
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(NUM_COPIES):
        target.copy_(source)
    synchronize(device)
    return 2 * size * NUM_COPIES / (time.perf_counter() - start)


def _read_option(text: str) -> tuple[str, Any]:
    """Name and value; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError("compile_option", "must be NAME=VALUE", text, "For example max_autotune=true.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(
    output: Annotated[Path, typer.Option(help="The JSON document; its tables go next to it, as .md.")],
    shape: Annotated[list[str] | None, typer.Option(help="Of 1B, 7B, SmolLM2 and tiny. Default: 1B and 7B.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, or the CPU.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a batch. Default: the shape's.")] = None,
    context_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prompt. Default: the shape's.")
    ] = None,
    row: Annotated[list[str] | None, typer.Option(help='Shell pattern of rows, such as "auto*". Default: all.')] = None,
    steps: Annotated[bool, typer.Option(help="Measure what a step costs, too.")] = True,
    num_texts: Annotated[int, typer.Option(min=1, help="That each row writes.")] = 4,
    num_prompts: Annotated[int, typer.Option(min=1, help="By which steps are measured.")] = 12,
    compile_mode: Annotated[
        CompileMode | None, typer.Option(help="Of torch.compile, over static caches. Default: transformers'.")
    ] = None,
    compile_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of torch.compile's options, in the place of a mode.")
    ] = None,
    sdpa_backend: Annotated[
        Backend | None, typer.Option(help="Kernels of PyTorch's attention, for all rows. Default: torch's choice.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also list each row's kernels, by one more call.")] = False,
    figures: Annotated[
        bool, typer.Option("--figures", help="The rows that say most, the most valuable first, in place of all.")
    ] = False,
    peer_python: Annotated[
        list[str] | None, typer.Option(help="LIBRARY=PATH: interpreter that has another library. Default: this one.")
    ] = None,
    max_minutes: Annotated[float, typer.Option(min=0.0, help="After which no row begins. Default: any.")] = math.inf,
) -> None:
    """Measure, and write one document."""
    check_document_file("output", output)
    earlier = load_document(output) if output.exists() and output.stat().st_size else None

    def keep(document: Document) -> None:
        write_document(document, output)
        output.with_suffix(".md").write_text(markdown(document))

    selection = Selection(
        tuple(batch or ()),
        tuple(context_length or ()),
        tuple(row or ()),
        steps,
        num_texts,
        num_prompts,
        compile_mode,
        dict(map(_read_option, compile_option or ())),
        sdpa_backend,
        profile,
    )
    names = shape or ["1B", "7B"]
    parts: Parts = figures_of(shape or ()) if figures else [(name, selection) for name in names]
    limits: dict[str, Any] = {
        "max_minutes": max_minutes,
        "earlier": earlier,
        "pythons": read_pythons(peer_python or ()),
    }
    measure_gpu(parts, device=device, **limits, keep=keep)


if __name__ == "__main__":
    run_program(main)
