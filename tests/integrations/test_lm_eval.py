"""lm-evaluation-harness: `hf-specdec` answers and scores as `hf` does, one by one and in batches."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
from hf_specdec.methods.auto.drafter import AutoDrafter
from tests.helpers.tokenizers import save_foreign_draft

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # the harness warns on its own
lm_eval = pytest.importorskip("lm_eval")
GENERATE = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n", "return"], max_gen_toks: 24}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["pass", "return x", "raise ValueError"]
doc_to_target: 1
metric_list: [{{metric: acc}}]
"""
PROMPTS = ["def add(a, b):\n    ", "class Stack:\n    def __init__(self):\n        ", "for x in xs:\n    ", "import "]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "answer": "self.items = []"}) + "\n" for prompt in PROMPTS))
    for name, template in {"tiny_generate": GENERATE, "tiny_choose": CHOOSE}.items():
        (folder / f"{name}.yaml").write_text(template.format(name=name, data=data))
    return folder


def evaluate(folder: Path, model: str, batch_size: int, **arguments: Any) -> tuple[Any, Any]:
    """Scores, and the answers by task."""
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(hf_specdec.embedded.path("target")), "dtype": "float32", **arguments},
        tasks=["tiny_generate", "tiny_choose"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    answers = {name: [sample["filtered_resps"] for sample in samples] for name, samples in found["samples"].items()}
    return found["results"], answers


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("how", [{"spec_method": "auto"}, {"lookahead_config": [3, 3, 3], "spec_method": "lookahead"}])
def test_scores_and_answers_are_those_of_hf(
    tasks: Path, batch_size: int, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    import hf_specdec.tools.integrations.lm_eval  # noqa: F401 - registers the class

    expected = evaluate(tasks, "hf", batch_size)
    ours = evaluate(tasks, "hf-specdec", batch_size, **how)
    assert ours == expected
    assert any(answer for answer in ours[1]["tiny_generate"])
    assert "without speculation" not in caplog.text


BEAMS = GENERATE.replace("max_gen_toks: 24", "max_gen_toks: 24, num_beams: 2")


def test_a_task_without_a_speculative_form_is_decoded_plainly(tmp_path: Path) -> None:
    """By a method that no one named; one that was named is refused."""
    import hf_specdec.tools.integrations.lm_eval

    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": PROMPTS[0], "answer": "x"}) + "\n")
    (tmp_path / "tiny_generate.yaml").write_text(BEAMS.format(name="tiny_generate", data=data))
    (tmp_path / "tiny_choose.yaml").write_text(CHOOSE.format(name="tiny_choose", data=data))
    assert evaluate(tmp_path, "hf-specdec", 1) == evaluate(tmp_path, "hf", 1)
    with pytest.raises(hf_specdec.ConfigError, match="num_beams"):
        evaluate(tmp_path, "hf-specdec", 1, spec_method="auto")


def test_nobody_names_a_method_and_auto_drafts(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_specdec.tools.integrations.lm_eval  # noqa: F401 - registers the class

    seen: list[str] = []
    draft_for = AutoDrafter.draft_for
    monkeypatch.setattr(AutoDrafter, "draft_for", lambda *_: seen.append("auto") or draft_for(*_))
    assert evaluate(tasks, "hf-specdec", 2) == evaluate(tasks, "hf", 2)
    assert seen


def test_a_draft_model_or_head_is_loaded_beside_it(tasks: Path) -> None:
    import hf_specdec.tools.integrations.lm_eval

    expected = evaluate(tasks, "hf", 2)
    for method, name in {"draft_model": "draft", "eagle3": "head"}.items():
        path = str(hf_specdec.embedded.path(name))
        assert evaluate(tasks, "hf-specdec", 2, spec_method=method, draft_model=path) == expected


def test_a_draft_with_a_tokenizer_of_its_own_is_translated(tasks: Path, tmp_path: Path) -> None:
    import hf_specdec.tools.integrations.lm_eval  # noqa: F401 - registers the class

    draft = save_foreign_draft(tmp_path, PROMPTS)
    assert evaluate(tasks, "hf-specdec", 2, spec_method="draft_model", draft_model=draft) == evaluate(tasks, "hf", 2)


def test_the_command_takes_a_list_form(tasks: Path) -> None:
    """`--model_args` as typed in a terminal, where commas stand in the list too."""
    arguments = f"pretrained={hf_specdec.embedded.path('target')},dtype=float32,lookahead_config=[3,3,3]"
    words = ["run", "--model", "hf-specdec", "--model_args", arguments, "--tasks", "tiny_generate"]
    command = [sys.executable, "-m", "hf_specdec.tools.integrations.lm_eval", *words, "--include_path", str(tasks)]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_generate" in done.stdout
