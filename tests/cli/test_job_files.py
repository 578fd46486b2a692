"""Nothing that a command did not write is touched, and nothing that it wrote is lost."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.common.files import check_output, replacing
from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli.job_file import JobFile, check_job_output
from hf_specdec.tools.cli.prompts_file import ManyOptions, read_prompts
from hf_specdec.tools.prompt_lines import BadLine, PromptLine

LINES = [{"index": index, "prompt": f"p{index}", "text": "x"} for index in range(3)]


def job(path: Path, **settings: Any) -> JobFile:
    return JobFile(path, {"model": "a", **settings})


def write_job(path: Path) -> bytes:
    """A finished job of three lines."""
    with job(path).held() as file:
        for line in LINES:
            file.append(line)
    return path.read_bytes()


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_bytes().decode().split("\n") if line]


FOREIGN = {
    "notes": b"# Notes\n\nbuy milk\n",
    "one line without an end": b"buy milk",
    "a table": b"index,prompt\n0,hello\n",
    "weights": b"\x10\x00\x00\x00\x00\x00\x00\x00" + b'{"a":{}}\n\xff\xfe\x00',
    "other JSON lines": b'{"index": 0, "text": "somebody\'s"}\n',
    "JSON that begins as a line does": b'{"index": 0, "text": "not end',
    "blank": b"\n\n",
    "a document": b"[1, 2, 3]\n",
    "deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    """Before anything is loaded, and again by the job itself."""
    out, prompts = tmp_path / "notes.md", tmp_path / "prompts.jsonl"
    out.write_bytes(content)
    prompts.write_text('"a"\n')
    with pytest.raises(ConfigError, match="new file, or one of the same job"):
        ManyOptions(prompts, out).check(prompt=None, compare=False, chat=False)
    with pytest.raises(ConfigError), job(out).held() as file:
        file.recover()
    assert out.read_bytes() == content


def test_the_file_of_prompts_is_no_output(tmp_path: Path) -> None:
    prompts, link = tmp_path / "p.jsonl", tmp_path / "link.jsonl"
    prompts.write_text('"a"\n')
    link.symlink_to(prompts)
    for out in (prompts, link):
        with pytest.raises(ConfigError, match="must not be the file of prompts"):
            check_job_output(out, prompts)
    assert prompts.read_text() == '"a"\n'


@pytest.mark.parametrize("place", ["p.jsonl/out.jsonl", "p.jsonl/more/out.jsonl"])
def test_a_folder_that_cannot_be_made_is_the_output_s_error(tmp_path: Path, place: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('"a"\n')
    with pytest.raises(ConfigError, match="`--out` must lie in a folder that can be made") as error:
        check_job_output(tmp_path / place, prompts)
    assert f"Choose another folder: {prompts}" in str(error.value)
    assert prompts.read_text() == '"a"\n'


@pytest.mark.parametrize("kind", ["device", "folder", "pipe"])
def test_what_is_no_regular_file_is_refused_and_stays_what_it_is(tmp_path: Path, kind: str) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    prompts.write_text('"a"\n')
    if kind == "device":
        out.symlink_to("/dev/null")
    elif kind == "folder":
        out.mkdir()
    else:
        os.mkfifo(out)
    before = out.lstat().st_mode
    for refused in (lambda: check_job_output(out, prompts), lambda: check_output("--out", out)):
        with pytest.raises(ConfigError, match="regular file"):
            refused()
    with pytest.raises(OSError, match="regular file"), replacing(out):
        pass
    assert out.lstat().st_mode == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_stays_a_link_and_modes_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    write_job(real)
    real.chmod(0o640)
    link.symlink_to(real)
    with job(link).held() as file:
        file.append({"index": 4, "text": "last"})
        file.append({"index": 3, "text": "before it"})
        file.finish(5)
    assert link.is_symlink()
    assert indices(real) == [0, 1, 2, 3, 4]
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_files_beside_the_output_are_left_alone(tmp_path: Path) -> None:
    """Not even those with the names that an editor or another tool would give a new version."""
    out = tmp_path / "out.jsonl"
    others = [tmp_path / f"out.jsonl{ending}" for ending in (".new", ".part", ".tmp", "~", ".lock")]
    for other in others:
        other.write_text("somebody's")
    with job(out).held() as file:
        for line in reversed(LINES):
            file.append(line)
        file.finish(3)
    assert indices(out) == [0, 1, 2]
    assert [other.read_text() for other in others] == ["somebody's"] * len(others)
    assert sorted(tmp_path.iterdir()) == sorted([out, *others])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_line_with_an_end_is_an_error_not_skipped(tmp_path: Path, place: int) -> None:
    lines = write_job(tmp_path / "out.jsonl").split(b"\n")
    lines[place] = lines[place][:20]
    (tmp_path / "out.jsonl").write_bytes(b"\n".join(lines))
    with (
        pytest.raises(ConfigError, match=f"Line {place + 1} is none of it"),
        job(tmp_path / "out.jsonl").held() as file,
    ):
        file.recover()
    assert (tmp_path / "out.jsonl").read_bytes() == b"\n".join(lines)


@pytest.mark.parametrize("count", [1, 5, 15, 30])
def test_a_line_that_was_cut_off_at_the_end_is_done_again(tmp_path: Path, count: int) -> None:
    out = tmp_path / "out.jsonl"
    content = write_job(out)
    out.write_bytes(content + b'{"index": 3, "prompt": "cut off'[:count])
    with job(out).held() as file:
        assert file.recover() == {0, 1, 2}
        assert out.read_bytes() == content
        file.append({"index": 3})
    assert indices(out) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "is_ours"),
    [
        (b'{"index": 0, "prompt": "def', True),
        (b'{"index": 3, "line": "def f(x):", "err', True),
        (b'{"index": ', False),
        (b'{"index": 0, "prompt": "of another program"}', False),
        (b"my own remark", False),
    ],
)
def test_a_first_line_that_was_cut_off_is_done_again(tmp_path: Path, content: bytes, is_ours: bool) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    if not is_ours:
        with pytest.raises(ConfigError, match="Line 1 is none of it"), job(out).held() as file:
            file.recover()
        assert out.read_bytes() == content
        return
    with job(out).held() as file:
        assert file.recover() == set()
        file.append({"index": 0})
    assert indices(out) == [0]


def test_an_end_that_is_no_line_of_ours_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    content = write_job(out) + b"my own remark"
    out.write_bytes(content)
    with pytest.raises(ConfigError), job(out).held() as file:
        file.recover()
    assert out.read_bytes() == content


def test_a_line_after_one_that_a_killed_process_left_unfinished_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with job(out).held() as file:
        file.append(LINES[0])
        out.write_bytes(out.read_bytes() + b'{"index": 1, "te')
        file.append(LINES[2])
    assert indices(out) == [0, 2]


def test_one_job_has_one_lock_and_the_second_is_told(tmp_path: Path) -> None:
    """Also after the first has replaced the file, and no line of either is lost."""
    out = tmp_path / "out.jsonl"
    with job(out).held() as file:
        file.append(LINES[0])
        with pytest.raises(ConfigError, match="must not be written by another command"), job(out).held():
            pass
        file.append(LINES[1])
    with job(out).held() as file:
        assert file.recover() == {0, 1}


def test_a_short_write_is_an_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    """As on a full disk: the process may write 200 bytes more than there are."""
    out = tmp_path / "out.jsonl"
    content = write_job(out)
    code = f"""
import resource
from pathlib import Path
from hf_specdec.common import files
from hf_specdec.tools.cli.job_file import JobFile
files.TRIED_BYTES = 0  # the disk has been tried before it filled up
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(content) + 200}, {len(content) + 200}))
with JobFile(Path({str(out)!r}), {{"model": "a"}}).held() as file:
    try:
        file.append({{"index": 3, "text": "x" * 400}})
    except OSError as error:
        print(error)
    file.append({{"index": 3, "text": "short"}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "200 of" in done.stdout
    assert indices(out) == [0, 1, 2, 3]


def test_a_finished_file_without_a_prompt_s_line_is_an_error(tmp_path: Path) -> None:
    write_job(tmp_path / "out.jsonl")
    with (
        pytest.raises(ConfigError, match="a line for each prompt, 5 in all"),
        job(tmp_path / "out.jsonl").held() as file,
    ):
        file.finish(5)


def test_of_two_lines_for_a_prompt_the_one_that_did_not_fail_counts(tmp_path: Path) -> None:
    with job(tmp_path / "out.jsonl").held() as file:
        file.append({"index": 0, "error": "no room"})
        file.append({"index": 1, "text": "first"})
        assert file.done() == {0, 1}
        assert file.done(retries_failed=True) == {1}
        file.append({"index": 1, "text": "second"})
        file.append({"index": 0, "text": "zero"})
        file.append({"index": 0, "error": "no room again"})
        assert [line["text"] for line in file.finish(2)] == ["zero", "first"]


@pytest.mark.parametrize("text", ["a\ud800b", "a\u2028b\u2029c\x85d", "\ufeffa", "ä\n\r\x1e"], ids=ascii)
def test_any_text_is_one_line_and_comes_back(tmp_path: Path, text: str) -> None:
    with job(tmp_path / "out.jsonl").held() as file:
        file.append({"index": 0, "text": text})
        assert file.recover() == {0}
        assert [line["text"] for line in file.finish(1)] == [text]
    content = (tmp_path / "out.jsonl").read_text("utf-8")
    assert len(content.splitlines()) == 1, "readers that split by every mark of Unicode see one line too"


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b'\xef\xbb\xbf"a"\n"b"\n', ["a", "b"]),
        ('"a\u2028b"\n"c\x85d"\n'.encode(), ["a\u2028b", "c\x85d"]),
        (b'"a"\r\n\r\n"b"', ["a", "b"]),
    ],
    ids=["byte order mark", "other line breaks", "carriage returns"],
)
def test_a_line_of_prompts_ends_at_a_line_feed_only(tmp_path: Path, content: bytes, prompts: list[str]) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    assert read_prompts(tmp_path / "p.jsonl") == [PromptLine((text,)) for text in prompts]


def test_half_a_surrogate_pair_is_one_prompt_s_error(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"good"\n"a\\ud800b"\n"' + "[" * 100_000 + "\n")
    good, half, deep = read_prompts(tmp_path / "p.jsonl")
    assert good == PromptLine(("good",))
    assert isinstance(half, BadLine)
    assert half.error.startswith("line 2 must be Unicode text, but character 1 is half of a pair, but is ")
    assert isinstance(deep, BadLine)
    assert "must be a string" in deep.error


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("p.jsonl", '"ä"\n'.encode("utf-16"), "UTF-16"),
        ("p.jsonl", '"a"\n'.encode("utf-16-le"), "zero bytes"),
        ("p.jsonl", '"ä"\n'.encode("latin-1"), "Latin-1"),
        ("p.jsonl", b"\x7fELF\x02\x01\x00\x00", "zero bytes"),
        ("p.jsonl.gz", b"no gzip at all", "Pack it again"),
        ("p.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "Pack it again"),
    ],
    ids=["UTF-16", "UTF-16 without a mark", "Latin-1", "binary", "no gzip", "broken gzip"],
)
def test_prompts_that_are_no_text_are_named(tmp_path: Path, name: str, content: bytes, remedy: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path / name)
    assert caught.value.field == "--prompts-file"
    assert caught.value.value == str(tmp_path / name)
    assert remedy in caught.value.remedy


def test_what_is_replaced_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("ne")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with replacing(tmp_path / "new") as temporary:
        temporary.write_text("x")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_said_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="can be written"):
        check_output("--out", tmp_path / "costs.json")
