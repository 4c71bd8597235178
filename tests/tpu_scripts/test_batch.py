"""Batches: quoting, resuming, pods, and a TPU that is taken away."""

import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"
REQUESTS = "one\ntwo\nthree\nfour\n"
ANSWERS = "ONE\nTWO\nTHREE\nFOUR\n"
MODEL = """/mnt/o'Brien's "best" model $HOME `x` \\"""
ENGINE = ["--", "--model", MODEL, "-tp", "8"]


@pytest.fixture(autouse=True)
def requests(cloud):
    cloud.write("my requests.jsonl", REQUESTS)


def flags(results):
    return ["--input", "my requests.jsonl", "--results", results, "--save-seconds", "1", *ENGINE]


def test_results_are_copied_back_and_names_survive_the_way(ready):
    done = ready.run("batch.sh", *flags("my results"))
    assert (ready.folder / "my results" / "output.jsonl").read_text() == ANSWERS
    command, *argv = ready.jaxllm_argv()
    assert command == "run-batch"
    assert argv[0::2][:2] == ["-i", "-o"]
    assert argv[4:] == ["--model", MODEL, "-tp", "8"]
    assert "0 of 4 are done" in done.stdout  # its log is followed


def test_results_go_to_a_bucket_and_requests_come_from_one(ready):
    bucket = ready.folder / "buckets" / "bucket"
    bucket.mkdir(parents=True)
    (bucket / "my requests.jsonl").write_text(REQUESTS)
    where = ["--input", "gs://bucket/my requests.jsonl", "--results", "gs://bucket/my results"]
    ready.run("batch.sh", *where, *ENGINE)
    assert (bucket / "my results" / "output.jsonl").read_text() == ANSWERS


def test_a_pod_runs_the_same_command_on_all_hosts(cloud):
    cloud.write("num_hosts", "2")
    cloud.run("create.sh", tpu="v5p-16")
    cloud.run("setup.sh", "--package", "jaxllm==1", tpu="v5p-16")
    cloud.run("batch.sh", *flags("results"), tpu="v5p-16")
    assert cloud.jaxllm_argv(0) == cloud.jaxllm_argv(1)
    assert cloud.jaxllm_argv(1)[-2:] == ["--nnodes", "auto"]
    assert (cloud.folder / "results" / "output.jsonl").read_text() == ANSWERS


@pytest.mark.parametrize("results", ["results", "gs://bucket/results"])
def test_a_finished_batch_is_finished_on_another_tpu(ready, results):
    ready.run("batch.sh", *flags(results))
    ready.run("delete.sh", "--yes")
    ready.run("create.sh")
    ready.run("setup.sh", "--package", "jaxllm==1")
    done = ready.run("batch.sh", *flags(results))
    assert "4 of 4 are done" in done.stdout
    output = ready.folder / results.replace("gs://", "buckets/") / "output.jsonl"
    assert output.read_text() == ANSWERS


def test_saved_results_do_not_replace_newer_ones_of_the_host(ready):
    ready.run("batch.sh", *flags("results"))
    (ready.folder / "results" / "saved.tar.gz").write_text("not even an archive")
    assert "4 of 4 are done" in ready.run("batch.sh", *flags("results")).stdout


def test_a_copy_of_growing_results_counts_none_that_it_lacks(ready, tmp_path):
    results = ready.host() / "batch" / "results"
    journal = results / "output.jsonl.journal"
    journal.mkdir(parents=True)
    (journal / "manifest.json").write_text("{}")
    grow = f'echo A >>"{results}/output.jsonl"; printf . >>"{journal}/journal"'
    subprocess.run(["sh", "-c", grow], check=True)
    ready.executable("cp", f'/bin/cp "$@"; {grow}')
    save = ["bash", SCRIPTS / "host" / "results.sh", "save", "batch"]
    subprocess.run(save, cwd=ready.host(), env=ready.environment(), check=True)
    copy = tmp_path / "copy"
    with tarfile.open(ready.host() / "batch" / "saved.tar.gz") as tar:
        tar.extractall(copy, filter="data")
    assert (copy / "output.jsonl.journal" / "journal").read_text() == "."
    assert (copy / "output.jsonl").read_text() == "A\nA\n"


def test_a_failed_batch_fails_with_its_status(ready):
    ready.write("fail_with", "3")
    done = ready.run("batch.sh", *flags("results"), ok=False)
    assert done.returncode == 3
    assert "the batch ended with status 3" in done.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--input": None}, "--input is missing"),
        ({"--results": None}, "--results is missing"),
        ({"--input": "nowhere"}, "--input 'nowhere' cannot be read"),
        ({"--save-seconds": "0"}, "--save-seconds '0' is no number above 0"),
        ({"--": None}, "the flags of jaxllm run-batch are missing: -- --model MODEL -tp 8"),
    ],
)
def test_wrong_flags_are_named(cloud, changed, message):
    given = {**{"--input": "my requests.jsonl", "--results": "r"}, **changed}
    given.setdefault("--", "--model")
    argv = [word for pair in given.items() if pair[1] is not None for word in pair]
    done = cloud.run("batch.sh", *argv, ok=False)
    assert message in done.stderr
    assert cloud.calls() == []


def test_a_command_that_is_sent_again_finds_its_job(ready):
    job = [*"bash jaxllm/host/job.sh run my-id bash -c".split(), "echo again >>runs; exit 4"]
    for _ in range(2):
        done = subprocess.run(
            job, cwd=ready.host(), env={**ready.environment(), "HOME": ready.host()}
        )
        assert done.returncode == 4
    assert (ready.host() / "runs").read_text() == "again\n"


def test_a_batch_outlives_its_connection_and_can_be_stopped(ready):
    ready.write("hold", "")
    with ready.start("batch.sh", *flags("results")) as first:
        assert first.stdout and first.stdout.readline() == "run-batch\n"
        os.killpg(first.pid, signal.SIGINT)  # Ctrl-C
    assert ": running: run-batch" in ready.run("status.sh").stdout
    assert "stopping" in ready.run("stop.sh").stdout
    for _ in range(1000):
        if ": exit status 143" in (listed := ready.run("status.sh").stdout):
            break
        time.sleep(0.05)
    assert listed.startswith("my-tpu: VM READY, request absent\n")
    assert listed.count(": exit status 143\n") == 1


def test_one_job_has_the_tpu_at_a_time(ready):
    ready.write("hold", "")
    with ready.start("batch.sh", *flags("results")) as first:
        assert first.stdout and first.stdout.readline() == "run-batch\n"
        with ready.start("batch.sh", *flags("results")) as second:
            assert second.stdout
            assert "another job has the TPU" in second.stdout.readline()
            (ready.folder / "hold").unlink()
            assert first.wait(300) == second.wait(300) == 0
            assert "4 of 4 are done" in second.stdout.read()


@pytest.mark.parametrize("results", ["results", "gs://bucket/results"])
def test_a_batch_survives_that_its_tpu_is_taken_away(cloud, results):
    folder = cloud.folder / results.replace("gs://", "buckets/")
    cloud.write("preempt_when", str(folder / "saved.tar.gz"))
    done = cloud.run("spot_batch.sh", "--package", "jaxllm==1", *flags(results))
    assert (folder / "output.jsonl").read_text() == ANSWERS
    assert "0 of 4 are done" in done.stdout
    assert "2 of 4 are done" in done.stdout
    lives = [a for a in cloud.actions() if a.startswith("queued-resources")]
    created = (
        "queued-resources create my-tpu --node-id=my-tpu --runtime-version=v2-alpha-tpuv6e "
        "--project my-project --zone us-east5-b --accelerator-type=v6e-8 --spot"
    )
    deleted = (
        "queued-resources delete my-tpu --project my-project --zone us-east5-b --force --quiet"
    )
    assert lives == [created, deleted, created, deleted]


def test_a_tpu_that_was_there_is_not_deleted_without_yes(ready):
    ready.write("preempt_when", str(ready.folder / "results" / "saved.tar.gz"))
    spot_batch = ["spot_batch.sh", "--package", "jaxllm==1"]
    done = ready.run(*spot_batch, *flags("results"), ok=False)
    assert "my-tpu was there before, and is PREEMPTED; --yes lets this delete it" in done.stderr
    assert not [a for a in ready.actions() if " delete " in a]
    done = ready.run(*spot_batch, "--yes", "--keep", *flags("results"))
    assert (ready.folder / "results" / "output.jsonl").read_text() == ANSWERS
    assert "my-tpu is left as it is" in done.stderr
    assert (ready.folder / "vm").read_text() == "READY"


def test_a_batch_that_fails_by_itself_is_not_repeated(cloud):
    cloud.write("fail_with", "3")
    done = cloud.run("spot_batch.sh", "--package", "jaxllm==1", *flags("results"), ok=False)
    assert "status 3, and my-tpu was not taken away: it is READY, and left as it is" in done.stderr
    assert len([action for action in cloud.actions() if "job.sh run" in action]) == 1


def test_what_a_batch_would_refuse_is_refused_before_a_tpu_is_created(cloud):
    done = cloud.run("spot_batch.sh", "--input", "nowhere", "--results", "r", *ENGINE, ok=False)
    assert "batch.sh: error: --input 'nowhere' cannot be read" in done.stderr
    assert cloud.calls() == []


def test_attempts_end(cloud):
    cloud.write("fail_with", "255")
    done = cloud.run(
        "spot_batch.sh", "--package", "jaxllm==1", "--attempts", "2", *flags("r"), ok=False
    )
    assert "gave up after 2 attempts; my-tpu is left as it is" in done.stderr
