import pytest
from tokenizers import Tokenizer

from jaxllm.config import ModelConfig
from jaxllm.messages import EngineInfo
from jaxllm.structured_output.vocabulary import load_vocabulary
from jaxllm.testing import make_tiny_checkpoint
from tests.stand_in import INFO


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return Tokenizer.from_file(f"{model_dir}/tokenizer.json")


@pytest.fixture(scope="session")
def info_of():
    """What an engine says of itself; 384 is the size of the tiny tokenizer."""

    def info_of(model_dir, *, vocab_size=384, eos_token_ids=(0,)):
        its = {"model_dir": model_dir, "vocab_size": vocab_size}
        fields = {name: getattr(INFO, name) for name in INFO.__struct_fields__}
        return EngineInfo(**(fields | its | {"eos_token_ids": list(eos_token_ids)}))

    return info_of


@pytest.fixture(scope="session")
def vocabulary(model_dir, info_of):
    return load_vocabulary(ModelConfig(model=model_dir), info_of(model_dir))
