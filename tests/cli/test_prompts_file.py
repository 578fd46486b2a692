"""Jobs over a file of prompts: every prompt once, whatever happens on the way."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hf_specdec
from hf_specdec.tools.prompt_lines import NotAPromptError, PromptLine, read_line
from tests.cli.conftest import Run
from tests.distributed.launch import launch

OPTIONS = ("--model", "embedded", "--max-new-tokens", "12", "--dtype", "fp32", "--spec-method", "prompt_lookup")
PROMPTS = [f"def f{number}(x, y):\n    return x + {number}\n\ndef g{number}(x" for number in range(12)]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """In the forms that a line may have, one that has none of them among them."""
    forms: list[Any] = [
        prompt if (key := (None, "prompt", "question", "text")[number % 4]) is None else {key: prompt, "id": number}
        for number, prompt in enumerate(PROMPTS)
    ]
    forms[5] = {"turns": [PROMPTS[5], "and then?"]}
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, forms)) + '\n\n{"nothing": "here"}\n', encoding="utf-8")
    return file


def lines_of(*files: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    return sorted(lines, key=lambda line: int(line["index"]))


def words_of(prompts_file: Path, out: Path) -> tuple[str, ...]:
    return ("generate", "--prompts-file", str(prompts_file), "--out", str(out), *OPTIONS)


def test_every_prompt_has_its_line(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run(*words_of(prompts_file, out), "--batch-size", "5")
    assert result.exit_code == 1, "one line was no prompt"
    assert "13 prompts" in result.stderr and "1 failed" in result.stderr
    lines = lines_of(out)
    assert [line["index"] for line in lines] == list(range(13))
    assert [line["prompt"] for line in lines[:-1]] == PROMPTS
    assert "must be a string" in lines[-1]["error"]
    alone = json.loads(run("generate", PROMPTS[7], *OPTIONS, "--json").stdout)
    assert (lines[7]["token_ids"], lines[7]["text"]) == (alone["token_ids"], alone["text"])
    before = out.read_bytes()
    again = run(*words_of(prompts_file, out))
    assert again.exit_code == 0 and "13 were done before" in again.stderr
    assert out.read_bytes() == before


def test_an_interrupted_job_goes_on_and_ends_the_same(
    run: Run, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that was cut off is decoded again."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(*words_of(prompts_file, whole), "--do-sample")
    generate_many = hf_specdec.generate_many

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        for number, result in enumerate(generate_many(*args, **kwargs)):
            if number == 4:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patched:
        patched.setattr(hf_specdec, "generate_many", interrupted)
        result = run(*words_of(prompts_file, out), "--do-sample")
    assert result.exit_code == 130
    assert f"interrupted: {out} keeps the results so far; the same command continues" in result.stderr
    assert len(lines_of(out)) == 5  # four texts and the line that is no prompt
    with out.open("ab") as file:
        file.write(b'{"index": 3, "prompt": "cut o')
    assert run(*words_of(prompts_file, out), "--do-sample").exit_code == 0
    assert lines_of(out) == lines_of(whole)


@pytest.mark.wide
def test_a_killed_job_goes_on_and_ends_the_same(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(*words_of(prompts_file, whole))
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_specdec", *words_of(prompts_file, out)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if out.exists() and out.read_bytes().count(b'"index"') >= 3:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(*words_of(prompts_file, out))
    assert lines_of(out) == lines_of(whole)


@pytest.mark.wide
def test_processes_share_a_job(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    """Each writes its share to a file of its own, and one process goes on with what they did."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(*words_of(prompts_file, whole), "--do-sample", "--seed", "3")
    launch("-m", "hf_specdec", *words_of(prompts_file, out), "--do-sample", "--seed", "3", timeout=300)
    shares = [tmp_path / f"out-rank{rank}.jsonl" for rank in range(2)]
    assert [{line["index"] for line in lines_of(share)} for share in shares] == [
        set(range(0, 13, 2)),
        set(range(1, 13, 2)),
    ]
    assert lines_of(*shares) == lines_of(whole)
    assert "13 were done before" in run(*words_of(prompts_file, out)).stderr
    assert out.read_bytes() == b""


@pytest.mark.parametrize(
    "content", [b"mine", b'{"a": 1}\n', b'{"index": 99}\n', b'{"index": 0}\nmine\n'], ids=lambda text: text.decode()[:9]
)
def test_an_output_that_no_such_job_wrote_is_refused_and_left_alone(
    run: Run, prompts_file: Path, tmp_path: Path, content: bytes
) -> None:
    out = tmp_path / "notes.jsonl"
    out.write_bytes(content)
    result = run(*words_of(prompts_file, out))
    assert result.exit_code == 2 and "`out` must be a new file" in result.stderr
    assert out.read_bytes() == content


def test_chats_of_a_file_go_through_the_template(run: Run, chat_model: str, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(chat) + '\n{"turns": ["Hello", "And?"]}\n"Hello"\n')
    words = ("generate", "--model", chat_model, "--max-new-tokens", "8", "--dtype", "fp32")
    files = ("--prompts-file", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o.jsonl"))
    assert run(*words, *files).exit_code == 0
    lines = lines_of(tmp_path / "o.jsonl")
    assert [line["prompt"] for line in lines] == [chat["messages"], [{"role": "user", "content": "Hello"}], "Hello"]
    alone = json.loads(run(*words, "Hello", "--chat", "--json").stdout)
    assert lines[1]["token_ids"] == alone["token_ids"] != lines[2]["token_ids"]


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, ANSWERED = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
TEXT_FORMS: list[Any] = ["Hello", {"prompt": "Hello"}, {"text": "Hello"}]
CHAT_FORMS: list[Any] = [
    {"messages": [ASKED]},
    {"messages": [ASKED, ANSWERED]},
    {"prompt": [ASKED]},
    {"turns": ["Hello"]},
    {"instruction": "Hello"},
    {"instruction": "Hello", "input": ""},
    {"question": "Hello"},
]


def test_a_text_is_continued() -> None:
    for form in TEXT_FORMS:
        assert read_line(json.dumps(form)) == PromptLine(("Hello",))


@pytest.mark.parametrize("form", CHAT_FORMS, ids=json.dumps)
def test_a_chat_goes_through_the_template_where_there_is_one(form: Any) -> None:
    line = read_line(json.dumps(form))
    assert line.chat == [ASKED]
    assert line.goes_through_template(SimpleNamespace(chat_template="{{ messages }}"))
    assert not line.goes_through_template(SimpleNamespace(chat_template=None))
    assert line.text == "Hello"


def test_a_chat_keeps_what_was_said_before_the_model_answers() -> None:
    later = {"role": "user", "content": "And then?"}
    line = read_line(json.dumps({"id": 7, "category": "talk", "messages": [SYSTEM, ASKED, ANSWERED, later, ANSWERED]}))
    assert line.before == (SYSTEM, ASKED, ANSWERED)
    assert line.turns == ("And then?",)
    assert (line.name, line.task) == ("7", "talk")
    assert line.text == "Be brief.\n\nHello\n\nHi\n\nAnd then?"


def test_an_instruction_s_input_stands_behind_it() -> None:
    for key in ("input", "context"):
        assert read_line(json.dumps({"instruction": "Translate", key: "Hello"})).turns == ("Translate\n\nHello",)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ({"messages": []}, "end with a message of a user"),
        ({"messages": [SYSTEM]}, "end with a message of a user"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r'messages with "role" \(system, developer'),
        ({"messages": [{"role": "user", "content": ["x"]}]}, '"content", a text'),
        ({"turns": ["Hello", ""]}, "none of them empty"),
        ({"turns": ["Hello", 3]}, "turns of text"),
        ({"messages": [{"role": "system", "content": "a\ud800"}, ASKED]}, "character 1 is half of a pair"),
        ({"words": "Hello"}, '"messages"'),
    ],
)
def test_what_is_wrong_with_a_line_is_said(value: Any, rule: str) -> None:
    with pytest.raises(NotAPromptError, match=rule):
        read_line(json.dumps(value))
