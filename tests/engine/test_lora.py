"""Adapters in an engine: each request is answered as by a model with its adapter merged in, whoever
is beside it."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, LoRARequest, SamplingParams, ValidationError
from jaxllm.files import read_json
from jaxllm.lora.device import adaptable_layers
from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import ModelRegistry, family_names
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.draws import ENCODERS
from tests.profile import TINY

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
PROMPTS = ["Once upon a time", [5, 6, 7] * 15, "The answer"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
# What of PEFT is served: settings by which the factor of B A differs from alpha / r.
SETTINGS = {
    "plain": {},
    "rslora": {"use_rslora": True, "target_modules": ["k_proj", "gate_proj", "o_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"mlp.*": 3}},
}


def merge(model, adapter, path):
    """Write the checkpoint of W + s B A, by PEFT's formula."""
    shutil.copytree(model, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, its = (
        load_file(model / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name in [name for name in its if name.endswith("lora_A.weight")]:
        a, b = its[name], its[name.replace("lora_A", "lora_B")]
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = 3 if "mlp" in layer and config.get("alpha_pattern") else config["lora_alpha"]
        scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        weights[f"{layer}.weight"] += scale * (b @ a)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    model = make_tiny_checkpoint(path / "model")
    adapters = {
        name: make_tiny_adapter(path / name, model, seed=seed, **its)
        for seed, (name, its) in enumerate(SETTINGS.items(), 1)
    }
    return path, model, adapters


@pytest.fixture(scope="module")
def loras(files):
    return [LoRARequest(name, i, path) for i, (name, path) in enumerate(files[2].items(), 1)]


@pytest.fixture(scope="module")
def llm(files):
    return LLM(files[1], **TINY | LORA | {"enforce_eager": False}, check_invariants=True)


@pytest.fixture(scope="module")
def alone(llm, loras):
    """The answers of each adapter, and of none, from steps in which there is nothing else."""
    return {
        lora: llm.generate(PROMPTS, PARAMS, lora_request=lora, use_tqdm=False)
        for lora in (None, *loras)
    }


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_a_request_is_answered_as_by_the_merged_model(files, loras, alone, assert_same, index):
    path, model, adapters = files
    lora = loras[index]
    merged = LLM(merge(model, adapters[lora.lora_name], path / f"merged{index}"), **TINY)
    assert_same(alone[lora], merged.generate(PROMPTS, PARAMS, use_tqdm=False), atol=1e-4)
    assert alone[lora][0].lora_request is lora
    assert alone[lora][0].outputs[0].lora_request is lora


@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen2_moe" else pytest.param(name, marks=pytest.mark.sweep)
        for name in family_names()
        if name not in ENCODERS
    ],
)
def test_every_linear_layer_of_a_family_takes_an_adapter(tmp_path, assert_same, family):
    model = make_tiny_checkpoint(tmp_path / "model", family)
    layers = layers_of(model)
    if not layers:
        pytest.skip("it stores weights [in, out]")
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    adapter = make_tiny_adapter(tmp_path / "adapter", model, target_modules=names)
    options = TINY | {"max_model_len": 64}
    llm = LLM(model, **options | LORA)
    lora = LoRARequest("all", 1, adapter)
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=[lora, None, lora], use_tqdm=False)
    merged = LLM(merge(model, adapter, tmp_path / "merged"), **options)
    expected = merged.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_same(outputs[::2], expected[::2], atol=1e-3)
    assert outputs[1].outputs[0].logprobs != expected[1].outputs[0].logprobs


def test_an_adapter_of_a_router_is_refused(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", "qwen2_moe")
    assert not any(layer.endswith(".gate") for layer in layers_of(model))
    adapter = make_tiny_adapter(tmp_path / "adapter", model, target_modules=["q_proj", "gate"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    weight = load_file(model / "model.safetensors")["model.layers.0.mlp.gate.weight"]
    for side, shape in ("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4)):
        tensors[f"base_model.model.model.layers.0.mlp.gate.lora_{side}.weight"] = np.ones(
            shape, "float32"
        )
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValidationError, match=r"model\.layers\.0\.mlp\.gate"):
        LLM(model, **TINY | LORA).generate(
            PROMPTS, PARAMS, lora_request=LoRARequest("router", 1, adapter), use_tqdm=False
        )


def layers_of(model):
    architecture = read_architecture(read_json(model / "config.json"))
    model = ModelRegistry.resolve([architecture.name]).abstract(architecture, "float32")
    return adaptable_layers(model)


def test_logits_are_those_of_transformers_with_the_merged_weights(files, loras, alone):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path, model, adapters = files
    merged = AutoModelForCausalLM.from_pretrained(
        merge(model, adapters["patterns"], path / "merged"), dtype="float32"
    )
    for output in alone[loras[2]]:
        answer = output.outputs[0]
        ids = torch.tensor([output.prompt_token_ids + answer.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(merged(ids).logits[0, :-1].double(), -1).numpy()
        for position, given in enumerate(answer.logprobs, len(output.prompt_token_ids) - 1):
            for token, its in given.items():
                assert its.logprob == pytest.approx(logprobs[position, token], abs=2e-4)


def test_a_mix_of_adapters_and_none_is_answered_as_each_alone(llm, loras, alone, assert_same):
    # More adapters than slots, so that some take the place of others meanwhile.
    mix = [None, *loras, loras[0], None, loras[2], loras[1]]
    prompts = [PROMPTS[i % 3] for i in range(len(mix))]
    outputs = llm.generate(prompts, PARAMS, lora_request=mix, use_tqdm=False)
    assert_same(outputs, [alone[lora][i % 3] for i, lora in enumerate(mix)])
    assert llm.llm_engine.stats().num_compiles_after_warmup == 0


def test_requests_without_an_adapter_are_those_of_an_engine_without(files, alone):
    plain = LLM(files[1], **TINY).generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [one.outputs[0].logprobs for one in alone[None]] == [
        one.outputs[0].logprobs for one in plain
    ]


def test_a_row_beside_adapters_gets_what_it_gets_alone_to_the_bit(llm, loras, alone):
    outputs = llm.generate(
        [PROMPTS[0], PROMPTS[1]], PARAMS, lora_request=[None, loras[0]], use_tqdm=False
    )
    [given], [wanted] = outputs[0].outputs, alone[None][0].outputs
    # The first token is of a mixed step in both, and the programs' products have equal shapes.
    assert given.logprobs == wanted.logprobs


def test_blocks_are_found_by_the_content_of_an_adapter(files, llm, loras, alone, assert_same):
    """The same name with other content is another adapter; another name for the same is not."""
    path = files[0] / "changing"
    shutil.copytree(files[2]["plain"], path)
    lora = LoRARequest("changing", 9, path)
    (first,) = llm.generate([PROMPTS[1]], PARAMS, lora_request=lora, use_tqdm=False)
    assert_same([first], alone[loras[0]][1:2])
    assert first.num_cached_tokens > 0
    shutil.rmtree(path)
    shutil.copytree(files[2]["rslora"], path)
    make_tiny_adapter(path, files[1], seed=17)
    (second,) = llm.generate([PROMPTS[1]], PARAMS, lora_request=lora, use_tqdm=False)
    assert second.num_cached_tokens == 0
    assert second.outputs[0].token_ids != first.outputs[0].token_ids


def test_adapters_go_to_sleep_and_come_back(llm, loras, alone, assert_same):
    llm.sleep(2)
    llm.wake_up()
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=loras[1], use_tqdm=False)
    assert_same(outputs, alone[loras[1]])


def test_adapters_in_memory_are_listed_pinned_and_removed(llm, loras):
    engine = llm.llm_engine
    for lora in loras[:2]:
        assert engine.add_lora(lora)
    assert {1, 2} <= engine.list_loras()
    assert engine.pin_lora(1) and not engine.pin_lora(77)
    llm.generate(PROMPTS, PARAMS, lora_request=loras[1:] + [loras[1]], use_tqdm=False)
    assert 1 in engine.list_loras()
    assert engine.remove_lora(1) and not engine.remove_lora(1)
    assert 1 not in engine.list_loras()


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ("sql", "lora_request='sql': it must be a LoRARequest"),
        (("a", 1, "/nowhere"), "lora_path='/nowhere': there is no such directory"),
    ],
)
def test_what_is_no_adapter_is_refused(llm, lora, reason):
    given = LoRARequest(*lora) if isinstance(lora, tuple) else lora
    with pytest.raises(ValidationError, match=reason):
        llm.generate(PROMPTS[0], PARAMS, lora_request=given, use_tqdm=False)


def test_an_adapter_that_is_gone_before_it_is_read_ends_its_request(files, llm):
    path = make_tiny_adapter(files[0] / "going", files[1], seed=23)
    engine = llm.llm_engine
    ids = {"prompt_token_ids": [5, 6, 7]}
    processed = engine.process_input("r", ids, PARAMS, lora_request=LoRARequest("going", 5, path))
    make_tiny_adapter(path, files[1], seed=24)
    engine.submit(processed)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [one.finish_reason for one in outputs[-1].outputs] == ["error"]


def test_an_engine_without_adapters_says_so(files, loras):
    llm = LLM(files[1], **TINY)
    with pytest.raises(ValidationError, match="start it with enable_lora=True"):
        llm.generate(PROMPTS[0], PARAMS, lora_request=loras[0], use_tqdm=False)
    with pytest.raises(ValidationError, match="start it with enable_lora=True"):
        llm.llm_engine.list_loras()


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"quantization": "int8"},
    ],
    ids=["speculation", "quantised base"],
)
def test_beside_other_options_answers_are_those_of_the_option(
    files, loras, alone, assert_same, options
):
    llm = LLM(files[1], **TINY, **LORA, **options, check_invariants=True)
    mix = [None, loras[0], loras[2]]
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=mix, use_tqdm=False)
    if "quantization" not in options:
        assert_same(outputs, [alone[lora][i] for i, lora in enumerate(mix)], atol=1e-4)
        return
    # Codes of 8 bits change logits a little; adapters change them much more.
    for i, lora in enumerate(mix):
        wanted, other = alone[lora][i].outputs[0], alone[loras[1]][i].outputs[0]
        given = first_logprobs(outputs[i].outputs[0])
        assert near(given, first_logprobs(wanted)) and not near(given, first_logprobs(other))


def first_logprobs(answer):
    return {token: its.logprob for token, its in answer.logprobs[0].items()}


def near(given, wanted):
    return given.keys() & wanted.keys() and all(
        abs(given[token] - wanted[token]) < 0.5 for token in given.keys() & wanted.keys()
    )
