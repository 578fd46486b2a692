"""The measurement: models and rows on every prompt in turn, round after round, kept as a document to be continued.

A machine's speed drifts, so all models take turns on a prompt, and within a model its rows. Ratios are always between
rows of one model, which run one after the other. A first round of watched calls warms everything up and looks into each
row; the timed rounds follow. Models take turns in the same order throughout: the row that begins always comes after
another model, and which one begins changes.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import transformers

from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench.document import SPEEDS, Save
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, check_models
from hf_specdec.tools.bench.model_run import ModelRun
from hf_specdec.tools.bench.plan import BenchSettings, visits
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.rows import DEFAULT, Row, named_rows
from hf_specdec.tools.bench.speeds import check_against, check_continues, summarize_again

Document = dict[str, Any]
Progress = Callable[[str, int, int], None]


class Bench:
    """One run. `document` holds what has been measured so far, at any time.

    Args:
        models (`Sequence[LoadedModel]`): the models, all on the same device.
        prompts (`Sequence[Prompt]`): what is continued.
        settings (`BenchSettings`): how it is measured.
        rows (`Iterable[str | Row]`, *optional*): rows apart from the reference, or their names; by default all that a
            model allows.
        against (`Sequence[str]`, *optional*): names of rows to compare all others with, besides the reference and
            transformers' own rows.
        document (`dict`, *optional*): an earlier document to continue; it must come from the same settings on the same
            hardware.
        by_cpu_time (`bool`, *optional*, defaults to `False`): summarise processor time instead of the clock's.
        method_state (`MethodState`, *optional*): what every row remembers when a round begins; nothing by default.

    Raises:
        ConfigError: `document` is from something else, a row is unknown, or a model lacks what a named row needs.
    """

    def __init__(
        self,
        models: Sequence[LoadedModel],
        prompts: Sequence[Prompt],
        settings: BenchSettings,
        *,
        rows: Iterable[str | Row] = (DEFAULT,),
        against: Sequence[str] = (),
        by_cpu_time: bool = False,
        document: Document | None = None,
        method_state: MethodState | None = None,
    ) -> None:
        check_models(models)
        self.settings, self.prompts = settings, list(prompts)
        names = list(rows)
        chosen = [named_rows(names, loaded) for loaded in models]
        entries = [
            {
                **model_facts(loaded),
                "rows": [row.describe() for row in own],
                "left_out": left_out,
                "records": [],
                "summary": {},
            }
            for loaded, (own, left_out) in zip(models, chosen, strict=True)
        ]
        check_against(against, [row.name for own, _ in chosen for row in own])
        fresh = new_document(
            SPEEDS,
            models[0].device,
            settings=json.loads(json.dumps(dataclasses.asdict(settings))),
            prompts=[{"id": prompt.id, "task": prompt.task} for prompt in prompts],
            against=list(against),
            by_cpu_time=by_cpu_time,
            models=entries,
        )
        if document is not None:
            check_continues(document, fresh)
            document.update({name: fresh[name] for name in ("settings", "against", "by_cpu_time")})
        self.document = fresh if document is None else document
        self.runs = [
            ModelRun(loaded, own, prompts, settings, entry, method_state)
            for loaded, (own, _), entry in zip(models, chosen, self.document["models"], strict=True)
        ]

    def run(self, progress: Progress | None = None, save: Save | None = None) -> Document:
        """Measure what the document does not hold yet.

        Args:
            progress (`Callable`, *optional*): called before each visit with its description, its number and the number
                of all.
            save (`Callable`, *optional*): called with the document after each visit, and at the end or an interrupt
                if it holds anything.
        """
        plan = list(visits(self.settings, self.prompts))
        per_round = sum(len(prompt.turns) for prompt in self.prompts)
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        self.document["is_complete"] = False
        try:
            for run in self.runs:
                run.warm_up()
            for number, visit in enumerate(plan):
                if progress is not None:
                    progress(str(visit), number, len(plan))
                measured = [run.measure(visit, number % per_round + visit.round) for run in self.runs]
                if any(measured) and save is not None:
                    save(self.document)
            self.document["is_complete"] = True
        finally:
            transformers.logging.set_verbosity(verbosity)
            summarize_again(self.document)
            if save is not None and any(entry["records"] for entry in self.document["models"]):
                save(self.document)
        return self.document
