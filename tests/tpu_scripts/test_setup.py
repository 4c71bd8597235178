"""Installing jaxllm on the hosts of a TPU."""

import json
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "tpu_scripts"


def test_hosts_and_users_get_the_jax_for_which_the_tests_compile():
    root = SCRIPTS.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    jax, libtpu = extras["optional-dependencies"]["tpu"]
    counted = json.loads((root / "tests/kernels/tpu_bundles.json").read_text())["libtpu"]
    assert libtpu == f"libtpu=={counted}"
    assert f"({jax.partition('==')[2]})" in (SCRIPTS / "setup.sh").read_text()


def uv_calls(host):
    return [json.loads(line) for line in (host / "jaxllm" / "uv.jsonl").read_text().splitlines()]


def test_the_checkout_is_installed_with_a_pinned_jax_on_every_host(cloud):
    cloud.write("num_hosts", "2")
    cloud.run("create.sh", tpu="v5p-16")
    cloud.run("setup.sh", tpu="v5p-16")
    commit = subprocess.check_output(["git", "-C", SCRIPTS, "rev-parse", "HEAD"], text=True).strip()
    for number in (0, 1):
        home = cloud.host(number) / "jaxllm"
        archive = home / f"{commit}.tar.gz"
        venv, install = uv_calls(cloud.host(number))
        assert venv[-3:] == ["--python", "3.11", "venv"]
        assert install[-2:] == ["jax[tpu]==0.10.2", f"jaxllm @ file://{archive}"]
        with tarfile.open(archive) as tar:
            assert "jaxllm/pyproject.toml" in tar.getnames()
        assert (home.stat().st_mode & 0o777) == 0o700


def test_jax_is_the_one_that_jaxllm_is_tested_with():
    (pinned,) = re.findall(r"^jax=(\S+)", (SCRIPTS / "setup.sh").read_text(), re.MULTILINE)
    readme = (SCRIPTS.parent / "README.md").read_text()
    assert f"with JAX {pinned} on Python 3.11" in readme


def test_what_is_installed_is_installed_once(ready):
    done = ready.run("setup.sh", "--package", "jaxllm==1")
    assert "jaxllm is set up" in done.stdout
    assert len(uv_calls(ready.host())) == 2
    ready.run("setup.sh", "--package", "jaxllm==2", "--jax", "0.11.2")
    assert uv_calls(ready.host())[-1][-2:] == ["jax[tpu]==0.11.2", "jaxllm==2"]


def test_nothing_is_installed_under_a_job(ready):
    lock = ready.host() / "jaxllm" / "jobs" / "lock"
    with subprocess.Popen(
        ["flock", lock, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as p:
        assert p.stdin and p.stdout
        p.stdin.write(b"x")
        p.stdin.flush()
        assert p.stdout.read(1) == b"x"  # the lock is taken
        done = ready.run("setup.sh", "--package", "jaxllm==2", ok=False)
        p.stdin.close()
    assert "a job runs with what is installed" in done.stderr
    assert len(uv_calls(ready.host())) == 2


def test_a_token_travels_in_a_file_that_nobody_else_reads(ready):
    ready.write("my token", "hf_secret\n")
    ready.run("setup.sh", "--package", "jaxllm==1", "--hf-token-file", "my token")
    token = ready.host() / ".cache" / "huggingface" / "token"
    assert token.read_text() == "hf_secret\n"
    assert (token.stat().st_mode & 0o777) == 0o600
    assert "hf_secret" not in str(ready.calls())


def test_a_token_file_that_is_not_there_is_named(ready):
    done = ready.run("setup.sh", "--hf-token-file", "nowhere", ok=False)
    assert "--hf-token-file 'nowhere' is missing or empty" in done.stderr
    assert ready.calls() == []
