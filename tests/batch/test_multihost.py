"""A batch on several hosts is rank 0's: the others compute, and touch none of its files."""

import json
import os
import subprocess
import sys

import pytest

from jaxllm.testing import make_tiny_checkpoint
from tests.ports import free_port
from tests.profile import OVER_HOSTS, SHARDED_MODEL, as_flags

COMMAND = [sys.executable, "-c", "import sys; from jaxllm.cli.main import main; sys.exit(main())"]


@pytest.mark.slow
def test_a_batch_runs_on_two_hosts_and_goes_on_there(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", **SHARDED_MODEL)
    flags = as_flags(OVER_HOSTS | {"model": str(model)})
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "16"}
    lines = [{"prompt_token_ids": [3 + i, 4], "max_tokens": 3 + i % 4} for i in range(12)]
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):  # the second time there is nothing left to do
        port = str(free_port())
        ranks = [
            subprocess.Popen(
                [
                    *COMMAND, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *flags,
                    "--nnodes", "2", "--node-rank", str(rank), "--master-port", port,
                ],
                cwd=folder,
                env=os.environ | env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, folder in enumerate(folders)
        ]  # fmt: skip
        for rank in ranks:
            _, err = rank.communicate(timeout=300)
            assert rank.returncode == 0, err
    assert len((folders[0] / "out.jsonl").read_text().splitlines()) == 12
    assert [path.name for path in folders[1].iterdir()] == ["in.jsonl"]
