import json

import pytest

from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ValidationError
from jaxllm.plan.generation_config import (
    read_default_sampling_params,
    read_eos_token_ids,
    read_max_new_tokens,
)


@pytest.fixture
def write(tmp_path):
    def write(**fields):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))

    return write


def read_eos(model_dir, of_config=(2,)):
    return read_eos_token_ids(model_dir, of_config=of_config, vocab_size=10)


def test_eos_ids_of_both_files_come_in_order_and_once(tmp_path, write):
    assert read_eos(tmp_path) == (2,)
    write(eos_token_id=7)
    assert read_eos(tmp_path) == (2, 7)
    write(eos_token_id=[7, 2, 9])
    assert read_eos(tmp_path) == (2, 7, 9)


@pytest.mark.parametrize("bad", ["2", True, 1.0, [3, "x"], [[3]], {"a": 1}, -1, 10])
def test_what_is_no_token_id_is_refused_with_its_file(tmp_path, write, bad):
    write(eos_token_id=bad)
    with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id"):
        read_eos(tmp_path)


def test_eos_id_of_the_config_must_be_in_the_vocabulary(tmp_path):
    with pytest.raises(CheckpointError, match="/config.json: eos_token_id 10.*below 10"):
        read_eos(tmp_path, of_config=(10,))


def test_default_sampling_params_come_from_the_generation_config(tmp_path, write):
    write(temperature=0.6, top_k=20, top_p=None, max_new_tokens=99, eos_token_id=1)
    params = read_default_sampling_params(ModelConfig(model="m"), tmp_path)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 99)
    plain = ModelConfig(model="m", generation_config="vllm")
    assert read_default_sampling_params(plain, tmp_path).temperature == 1.0


def test_the_longest_answer_is_known_only_if_the_model_says_one(tmp_path, write):
    config = ModelConfig(model="m")
    assert read_max_new_tokens(config, tmp_path) is None
    write(max_new_tokens=16)
    assert read_max_new_tokens(config, tmp_path) == 16
    elsewhere = ModelConfig(model="m", generation_config=str(tmp_path))
    assert read_max_new_tokens(elsewhere, tmp_path / "nowhere") == 16
    assert read_max_new_tokens(ModelConfig(model="m", generation_config="vllm"), tmp_path) is None


def test_generation_config_that_is_missing_is_refused_only_if_asked_for(tmp_path):
    assert read_default_sampling_params(ModelConfig(model="m"), tmp_path).temperature == 1.0
    asked = ModelConfig(model="m", generation_config=str(tmp_path))
    with pytest.raises(ValidationError, match="generation_config='.*has no generation_config.json"):
        read_default_sampling_params(asked, tmp_path)


def test_generation_config_that_is_wrong_is_refused_with_a_remedy(tmp_path, write):
    write(top_p=7)
    with pytest.raises(ValidationError, match="top_p=7.*generation_config='vllm'"):
        read_default_sampling_params(ModelConfig(model="m"), tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="generation_config.json holds a list"):
        read_default_sampling_params(ModelConfig(model="m"), tmp_path)
