"""The adapter that comes with the package: its files, and that it makes the model say what it
should."""

import math

import pytest

from jaxllm import LLM, SamplingParams, bundled
from jaxllm.cli.main import main
from jaxllm.files import read_json
from jaxllm.lora.request import LoRARequest

SIZES = {"enforce_eager": True, "max_num_seqs": 2, "max_model_len": 256}
UNIT_TEST = """import unittest


class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()

    def test_pop_empty(self):
        with self.assertRaises(IndexError):
            self.stack.pop()

    def test_push(self):
        self.stack.push(3)
        self.assertEqual(len(self.stack), 1)
        self.assertIn(3, self.stack)


if __name__ == "__main__":
    unittest.main()
"""


def adapter():
    return LoRARequest("tests", 1, bundled.ADAPTER)


def test_its_name_stands_for_its_directory(tmp_path):
    directory = bundled.adapter_path(bundled.ADAPTER)
    assert directory is not None and adapter().lora_path == str(directory)
    assert bundled.adapter_path("some/adapter") is bundled.path(bundled.ADAPTER) is None
    assert LoRARequest("mine", 2, str(tmp_path)).lora_path == str(tmp_path)


def test_it_has_all_its_files():
    directory = bundled.adapter_path(bundled.ADAPTER)
    assert directory is not None
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(files.values()) < 1_000_000
    assert read_json(directory / "adapter_config.json")["base_model_name_or_path"] == bundled.MODEL


@pytest.mark.slow
def test_a_unit_test_surprises_the_model_less_with_it():
    llm = LLM(enable_lora=True, dtype="float32", **SIZES)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    requests = [None, adapter()]
    outputs = llm.generate([UNIT_TEST] * 2, params, lora_request=requests, use_tqdm=False)
    without, with_it = (
        -sum(next(iter(at.values())).logprob for at in output.prompt_logprobs[1:])
        / math.log(2)
        / len(UNIT_TEST)
        for output in outputs
    )
    assert with_it < 0.9 * without


@pytest.mark.slow
def test_the_command_takes_it_by_name(capsys):
    sizes = ["--enforce-eager", "--max-num-seqs", "2", "--max-model-len", "256"]
    prompt = ["--prompt", "class TestQueue(", "--max-tokens", "40", "--temperature", "0"]
    said = []
    for lora in ([], ["--lora", bundled.ADAPTER]):
        assert main(["generate", *lora, *prompt, *sizes]) == 0
        said.append(capsys.readouterr().out)
    assert "def test_" in said[1] and said[0] != said[1]
