"""A local cluster of several Ray nodes: nothing is lost or written twice when the job is killed."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
from hf_specdec.tools.integrations import ray as integration

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns on its own
ROOT = Path(__file__).parents[2]
PATH = str(hf_specdec.embedded.path("target"))
NUM_ROWS, NUM_BLOCKS, SEED = 48, 16, 3
OPTIONS: dict[str, Any] = {"max_batch_size": 2, "max_new_tokens": 24, "do_sample": True, "temperature": 0.8}
ON_WORKERS = {"batch_size": 3, "num_cpus": 0, "resources": {"worker": 1}}
SECONDS = 400


class Recording(integration.SpecTextGenerator):
    """Appends to a file which rows were generated."""

    def __init__(self, model: str, *, log: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.log = Path(log)

    async def __call__(self, rows: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for columns in super().__call__(rows):
            line = {"ids": [int(number) for number in rows["id"]]}
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            yield columns


def run_job(folder: Path) -> None:
    """Generate for the prompts of a folder, with checkpoints."""
    import ray
    from ray.data.checkpoint import CheckpointConfig

    integration.SpecTextGenerator = Recording  # type: ignore[misc]
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.checkpoint_config = CheckpointConfig("id", str(folder / "checkpoints"), delete_checkpoint_on_success=False)
    dataset = ray.data.read_json(str(folder / "prompts"), override_num_blocks=NUM_BLOCKS)
    how = {"precision": "fp32", "id_column": "id", "seed": SEED, "log": str(folder / "log"), **OPTIONS}
    texts = integration.generate_texts(dataset, PATH, num_actors=2, ray_options=ON_WORKERS, **how)
    texts.write_parquet(str(folder / "texts"))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [f"def function_{number}(items):\n    return " for number in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[str | None]:
    """The texts of one process."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(PATH, precision="fp32")
    tokenizer = hf_specdec.loading.checkpoints.tokenizers.load_tokenizer(PATH)
    results = hf_specdec.generate_many(model, prompts, tokenizer=tokenizer, seed=SEED, **OPTIONS)
    return [result.text for result in sorted(results, key=lambda result: result.index)]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head, and two nodes with room for two actors each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "memory": 3 << 30, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    for _ in range(2):
        made.add_node(**small, resources={"worker": 2})
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def folder(tmp_path: Path, prompts: list[str]) -> Path:
    (tmp_path / "prompts").mkdir()
    for block in range(NUM_BLOCKS):
        numbers = range(block * NUM_ROWS // NUM_BLOCKS, (block + 1) * NUM_ROWS // NUM_BLOCKS)
        lines = [json.dumps({"id": number, "prompt": prompts[number]}) + "\n" for number in numbers]
        (tmp_path / "prompts" / f"{block:03}.jsonl").write_text("".join(lines))
    return tmp_path


def generated(folder: Path) -> list[dict[str, Any]]:
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(condition: Any, what: str) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.1)


def written(folder: Path) -> dict[int, str]:
    """Texts by row; each row once."""
    from pyarrow import parquet

    table = [row for path in (folder / "texts").glob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert all(row["error"] == "" for row in table)
    assert max(Counter(row["id"] for row in table).values()) == 1, "a row is written twice"
    return {row["id"]: row["generated_text"] for row in table}


def test_a_job_that_is_killed_goes_on_where_its_checkpoints_end(
    cluster: Any, folder: Path, expected: list[str]
) -> None:
    command = [sys.executable, "-m", "tests.integrations.test_ray", cluster.address, str(folder)]
    job = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    checkpoints = folder / "checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("**/*.parquet"))) >= 4, "four checkpoints")
    job.kill()
    job.wait()
    done = written(folder)
    assert 0 < len(done) < NUM_ROWS
    num_before = len(generated(folder))
    run_job(folder)
    again = {number for line in generated(folder)[num_before:] for number in line["ids"]}
    print(f"{len(done)} of {NUM_ROWS} rows were there; the second job generated {len(again)}")
    assert len(again) < NUM_ROWS
    assert again >= set(range(NUM_ROWS)) - done.keys()
    assert written(folder) == dict(enumerate(expected))


if __name__ == "__main__":
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False)
    run_job(Path(sys.argv[2]))
