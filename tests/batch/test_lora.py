"""Batches with adapters: a line names one as its model, and gets what `generate --lora` answers."""

import json

import pytest

from jaxllm.cli.main import main
from jaxllm.testing import make_tiny_adapter

LORA = ["--max-loras=2", "--max-lora-rank=8"]
FIELDS = {"prompt": "Once", "max_tokens": 6, "temperature": 0}


@pytest.fixture
def adapter(tmp_path, engine_options):
    return make_tiny_adapter(tmp_path / "sql", engine_options["model"])


@pytest.fixture
def modules(adapter):
    return ["--enable-lora", *LORA, "--lora-modules", f"sql={adapter}"]


def test_lines_name_adapters(bench, flags, adapter, modules, capsys):
    completion = {"custom_id": "a", "url": "/v1/completions"}
    bench.write(
        completion | {"body": FIELDS | {"model": "sql"}},
        FIELDS | {"model": "sql"},
        FIELDS,
        FIELDS | {"model": "nothing"},
    )
    assert bench.run(*modules) == 0
    answers = bench.answers()
    body = next(one for one in answers if "response" in one)["response"]["body"]
    plain = {one["line"]: one["outputs"][0]["text"] for one in answers if "line" in one}
    assert body["model"] == "sql"
    assert body["choices"][0]["text"] == plain[2] != plain[3]
    (error,) = bench.errors()
    assert "'sql' (--served-model-name and --lora-modules" in error["error"]["message"]

    capsys.readouterr()
    sampling = ["--prompt=Once", "--max-tokens=6", "--temperature=0", "--json"]
    main(["generate", *sampling, f"--lora={adapter}", *LORA, *flags])
    assert json.loads(capsys.readouterr().out)["text"] == plain[2]


def test_only_with_the_same_adapters_is_a_batch_gone_on_with(
    bench, adapter, modules, engine_options, capsys
):
    bench.write(FIELDS)
    assert bench.run(*modules) == 0
    make_tiny_adapter(adapter, engine_options["model"], seed=9)
    assert bench.run(*modules) == 2
    assert "begun with something else: lora_modules was" in capsys.readouterr().err
