"""An adapter is trained: it learns, its base stays, and the engine serves what was trained."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import LLM, LoRARequest, SamplingParams, ValidationError
from jaxllm.testing import make_tiny_checkpoint
from jaxllm.training.options import AdapterOptions
from jaxllm.training.trainer import Trainer


def matrices_of(folder):
    """What was written, by the names of the trainer."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".weight"): array
        for name, array in load_file(folder / "adapter_model.safetensors").items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def make(small_run, base):
    def make(name, run=None, **adapter):
        options = small_run(name, data={"tokenizer": None}, **(run or {"steps": 2}))
        adapter = {"lora": str(base), "lora_rank": 4, "lora_alpha": 8} | adapter
        return dataclasses.replace(options, adapter=AdapterOptions(**adapter))

    return make


@pytest.fixture(scope="module")
def trained(make):
    trainer = Trainer(make("adapter", {"steps": 12, "learning_rate": 2e-2}))
    return trainer, trainer.run()


@pytest.mark.slow
def test_it_learns_beginning_with_its_base(trained):
    trainer, folder = trained
    first, last = trainer.model.initial_weights(0), matrices_of(folder)
    rows = np.array(trainer.data.heldout[:66], np.int32).reshape(2, 33)
    logits = trainer.adapter.base.logits(trainer.adapter.frozen, rows)
    np.testing.assert_array_equal(trainer.model.logits(trainer._frozen | first, rows), logits)
    assert trainer.bits_per_byte(last, 4) < trainer.bits_per_byte(first, 4) - 0.3


@pytest.mark.slow
def test_the_engine_serves_what_was_trained(trained, base):
    trainer, folder = trained
    llm = LLM(
        str(base), dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=128,
        max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks_override=32, block_size=16,
        enforce_eager=True, skip_tokenizer_init=True,
    )  # fmt: skip
    row = np.array(trainer.data.train[:33], np.int32)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    lora = LoRARequest("trained", 1, folder)
    prompt = {"prompt_token_ids": row.tolist()}
    (output,) = llm.generate([prompt], params, lora_request=lora, use_tqdm=False)
    given = [entry[t].logprob for t, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
    surprise = trainer._surprise(matrices_of(folder), trainer._frozen, row[None])[0]
    np.testing.assert_allclose(given, -np.asarray(surprise), atol=2e-4)
    (plain,) = llm.generate([prompt], params, use_tqdm=False)
    assert abs(plain.prompt_logprobs[5][int(row[5])].logprob - given[4]) > 1e-3


@pytest.mark.slow
def test_only_the_named_layers_are_trained(make):
    trainer = Trainer(make("some", lora_targets=("q_proj", "down_proj")))
    folder = trainer._export(trainer.model.initial_weights(0))
    names = load_file(folder / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == {"q_proj", "down_proj"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(make):
    with pytest.raises(ValidationError, match="lora_targets=.*no such layers"):
        Trainer(make("none", lora_targets=("x_proj",)))
    options = make("both")
    run = dataclasses.replace(options.run, initial_model="bundled")
    with pytest.raises(ValidationError, match="initial_model is for whole models"):
        dataclasses.replace(options, run=run).validate()
