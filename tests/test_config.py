import dataclasses
from pathlib import Path

import pytest

import jaxllm
from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError


def test_model_may_be_a_path():
    config = EngineConfig.create(Path("some") / "model", tokenizer=Path("other"))
    assert (config.model.model, config.model.tokenizer) == ("some/model", "other")


def test_logits_processors_may_be_any_list():
    for given in (["m:A", dict], ("m:A", dict)):
        config = EngineConfig.create("m", logits_processors=given)
        assert config.model.logits_processors == ("m:A", dict)
    for none in (None, [], ()):
        assert EngineConfig.create("m", logits_processors=none).model.logits_processors == ()
    with pytest.raises(ValidationError, match="logits_processors='m:A' has type str"):
        EngineConfig.create("m", logits_processors="m:A")


def test_arguments_of_vllm_that_ask_for_nothing_are_accepted():
    plain = EngineConfig.create("m")
    for name, value in {
        "disable_log_stats": True,
        "quantization": None,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "tokenizer_mode": "auto",
    }.items():
        assert dataclasses.asdict(EngineConfig.create("m", **{name: value})) == dataclasses.asdict(
            plain
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("fully_sharded_loras", True), ("tokenizer_mode", "mistral")],
)
def test_what_they_ask_for_otherwise_is_refused_by_name(name, value):
    with pytest.raises(ValidationError, match=f"{name}={value!r}: not supported yet") as caught:
        EngineConfig.create("m", **{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize("name", jaxllm.__all__)
def test_every_public_name_is_there(name):
    assert getattr(jaxllm, name) is not None


@pytest.mark.parametrize(
    "name", ["RequestStateStats", "CheckpointError", "OutOfMemoryError", "UnsupportedModelError"]
)
def test_outputs_and_errors_are_public(name):
    assert name in jaxllm.__all__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2, "node_rank": 2}, "node_rank=2: nnodes=2; ranks are 0 to 1"),
        ({"nnodes": "many"}, "nnodes='many' is not one of 'auto'"),
        ({"nnodes": 0}, "nnodes=0 is too small"),
        ({"master_port": 70_000}, "master_port=70000: ports are 1 to 65535"),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, "stages are on the devices of one host"),
        ({"nnodes": "auto", "pipeline_parallel_size": 2}, "stages are on the devices of one host"),
    ],
)
def test_hosts_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig.create("m", **options)


def test_a_process_may_follow_only_where_several_are_started_by_hand():
    def may_follow(**options):
        return EngineConfig.create("m", **options).parallel.may_follow

    assert may_follow(nnodes=2) and may_follow(nnodes="auto")
    assert not may_follow() and not may_follow(nnodes=2, distributed_executor_backend="ray")
