"""Creating, awaiting and deleting a TPU; the flags that all scripts share."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"

ALL = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name != "common.sh")
WHERE = "--project my-project --zone us-east5-b"
TPU = [*WHERE.split(), "--name", "my-tpu"]


def test_a_tpu_is_created_and_awaited(cloud):
    done = cloud.run("create.sh")
    assert cloud.actions() == [
        f"tpu-vm create my-tpu --version=v2-alpha-tpuv6e {WHERE} --accelerator-type=v6e-8"
    ]
    assert "my-tpu is ready: v6e-8, 8 chips, 1 host(s)" in done.stderr


def test_a_spot_tpu_is_queued_for(cloud):
    done = cloud.run(
        "create.sh", "--queued", "--spot", "--runtime-version", "mine", "--", "--network=n 1"
    )
    assert cloud.actions() == [
        f"queued-resources create my-tpu --node-id=my-tpu --runtime-version=mine {WHERE} "
        "--accelerator-type=v6e-8 --spot --network=n 1"
    ]
    assert "my-tpu is WAITING_FOR_RESOURCES; next look in 0 s" in done.stderr
    assert "my-tpu is PROVISIONING" in done.stderr
    assert "my-tpu is ready" in done.stderr


def test_a_tpu_that_exists_is_left_alone(ready):
    assert "my-tpu exists" in ready.run("create.sh").stderr
    assert ready.actions() == []


@pytest.mark.parametrize("state", ["PREEMPTED", "FAILED"])
def test_a_tpu_that_will_not_come_is_not_awaited(cloud, state):
    cloud.write("vm", state)
    done = cloud.run("create.sh", ok=False)
    assert f"error: my-tpu is {state}" in done.stderr
    assert cloud.actions() == []


def test_an_unanswered_question_is_not_taken_for_no_tpu(cloud):
    cloud.write("refuse", "PERMISSION_DENIED: not for you")
    for script in ("create.sh", "status.sh", "delete.sh"):
        assert (
            "error: cannot ask for my-tpu: PERMISSION_DENIED" in cloud.run(script, ok=False).stderr
        )
    assert cloud.actions() == []


def test_a_network_that_is_away_is_waited_for(ready):
    ready.write("fail_once", "Unable to find the server at tpu.googleapis.com")
    done = ready.run("status.sh")
    assert "trying again in 0 s: Unable to find the server" in done.stderr
    assert "my-tpu: VM READY" in done.stdout


@pytest.mark.parametrize(
    ("tpu", "accelerator", "runtime", "chips", "hosts"),
    [
        ("v4-8", "v4-8", "tpu-ubuntu2204-base", 4, 1),
        ("v4-16", "v4-16", "tpu-ubuntu2204-base", 8, 2),
        ("v5e-1", "v5litepod-1", "v2-alpha-tpuv5-lite", 1, 1),
        ("v5e-4", "v5litepod-4", "v2-alpha-tpuv5-lite", 4, 1),
        ("v5e-8", "v5litepod-8", "v2-alpha-tpuv5-lite", 8, 1),
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite", 16, 4),
        ("v5p-8", "v5p-8", "v2-alpha-tpuv5", 4, 1),
        ("v5p-16", "v5p-16", "v2-alpha-tpuv5", 8, 2),
        ("v6e-1", "v6e-1", "v2-alpha-tpuv6e", 1, 1),
        ("v6e-4", "v6e-4", "v2-alpha-tpuv6e", 4, 1),
        ("v6e-8", "v6e-8", "v2-alpha-tpuv6e", 8, 1),
        ("v6e-16", "v6e-16", "v2-alpha-tpuv6e", 16, 4),
        ("v7x-8", "tpu7x-8", "v2-alpha-tpu7-ubuntu2404", 4, 1),
    ],
)
def test_slices_have_googles_names(cloud, tpu, accelerator, runtime, chips, hosts):
    done = cloud.run("create.sh", tpu=tpu)
    (action,) = cloud.actions()
    assert f"--version={runtime} " in action
    assert action.endswith(f"--accelerator-type={accelerator}")
    assert f"{chips} chips, {hosts} host(s)" in done.stderr


def test_every_slice_that_can_be_planned_for_can_be_created(cloud):
    from jaxllm_kernels.topology import topology_names

    slices = [name for name in topology_names() if name.startswith("v")]
    assert len(slices) > 5
    for name in slices:
        cloud.run("create.sh", "--dry-run", tpu=name)


@pytest.mark.parametrize("tpu", ["v5litepod-8", "v6e", "v6e-12", "v5p-4", "v4-08", "h200", ""])
def test_an_unknown_slice_is_refused_by_name(cloud, tpu):
    done = cloud.run("create.sh", tpu=tpu, ok=False)
    assert "error: --tpu" in done.stderr
    assert cloud.calls() == []


@pytest.mark.parametrize("script", ALL)
@pytest.mark.parametrize("flag", ["project", "zone", "name", "tpu"])
def test_a_missing_flag_is_named(cloud, script, flag):
    flags = [*TPU, "--tpu", "v6e-8"]
    at = flags.index(f"--{flag}")
    done = cloud.run_plain(script, *flags[:at], *flags[at + 2 :])
    assert done.returncode == 2
    assert f"{script}: error: --{flag} is missing" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--zone"], "--zone needs a value"),
        (["--zone", "--dry-run"], "--zone needs a value"),
        (["--name", "My TPU"], "--name 'My TPU': small letters"),
        (["--poll-seconds", "soon"], "--poll-seconds 'soon' is no whole number"),
        (["--spott"], "unknown argument '--spott'"),
        (["spot"], "unknown argument 'spot'"),
        (["--project zone", "x"], "unknown argument '--project zone'"),
    ],
)
def test_a_wrong_flag_is_named(cloud, flags, message):
    done = cloud.run("create.sh", *flags, ok=False)
    assert f"create.sh: error: {message}" in done.stderr
    assert cloud.calls() == []


def test_values_may_follow_an_equals_sign(cloud):
    cloud.run_plain("create.sh", "--project=p", "--zone=z", "--name=n", "--tpu=v6e-1")
    assert cloud.actions() == [
        "tpu-vm create n --version=v2-alpha-tpuv6e --project p --zone z --accelerator-type=v6e-1"
    ]


@pytest.mark.parametrize("script", ALL)
def test_help_needs_nothing(cloud, script):
    done = cloud.run_plain(script, "--help")
    assert done.returncode == 0
    assert f"  {script} --project ID --zone ZONE --name NAME --tpu SLICE" in done.stdout
    assert "--dry-run" in done.stdout
    assert not done.stdout.startswith("#")


def test_nothing_is_deleted_without_yes(ready):
    done = ready.run("delete.sh", ok=False)
    assert "my-tpu is READY; --yes deletes it" in done.stderr
    assert ready.actions() == []
    ready.run("delete.sh", "--yes")
    assert ready.actions() == [f"tpu-vm delete my-tpu {WHERE} --quiet"]


def test_a_queued_tpu_goes_with_its_request(cloud):
    cloud.run("create.sh", "--queued")
    cloud.run("delete.sh", "--yes")
    assert cloud.actions()[1:] == [f"queued-resources delete my-tpu {WHERE} --force --quiet"]


def test_there_may_be_nothing_to_delete(cloud):
    assert "there is no my-tpu in us-east5-b" in cloud.run("delete.sh", "--yes").stderr
    assert cloud.actions() == []


@pytest.mark.parametrize("script", ALL)
def test_a_dry_run_shows_commands_and_runs_none(cloud, script):
    (cloud.folder / "in.jsonl").touch()
    needed = {
        "batch.sh": ["--input", "in.jsonl", "--results", "out", "--", "--model", "m"],
        "profile.sh": ["--traces", "traces", "--", "--model", "m"],
        "serve.sh": ["--model", "m"],
    }
    needed["spot_batch.sh"] = needed["batch.sh"]
    files = sorted(cloud.folder.iterdir())
    done = cloud.run(script, "--dry-run", *needed.get(script, []))
    assert cloud.calls() == []
    assert sorted(cloud.folder.iterdir()) == files
    # What is shown can be run as it is: here, by a shell in which commands only show themselves.
    shown = 'gcloud() { echo gcloud "${@@Q}"; }; git() { :; }; mkdir() { :; }; find() { :; }\n'
    ran = subprocess.run(
        ["bash", "-uec", shown + done.stdout], capture_output=True, text=True, cwd=cloud.folder
    )
    assert ran.returncode == 0, ran.stderr
    expected = [line for line in done.stdout.splitlines() if line.startswith("gcloud ")]
    assert len(ran.stdout.splitlines()) == len(expected) > 0
