"""The report names the facts and nothing of the environment."""

import jaxllm
from jaxllm.cli import collect_env
from jaxllm.cli.main import main


def test_report_names_versions_machine_and_devices(capsys):
    assert main(["collect-env"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["jaxllm"] == jaxllm.__version__
    assert rows["devices"].split(":")[0] in ("cpu", "gpu", "tpu")
    assert rows["memory"].endswith("GiB")
    assert {"python", "jax", "transformers", "processor", "cores", "compile"} <= rows.keys()


def test_a_missing_package_is_a_row_and_not_an_error(monkeypatch):
    monkeypatch.setattr(collect_env, "PACKAGES", ("numpy", "no-such-package"))
    found = collect_env.versions()
    assert found["no-such-package"] == "not installed"
    assert found["numpy"] != "not installed"


def test_the_environment_is_not_printed(monkeypatch, capsys):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "7f3d-secret")
    main(["collect-env"])
    assert "7f3d-secret" not in capsys.readouterr().out
