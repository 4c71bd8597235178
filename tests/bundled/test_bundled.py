"""The models that come with the package: files, sizes, and that they say what they should."""

import hashlib
import json
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, EngineArgs, SamplingParams, bundled
from jaxllm.cli.main import main
from jaxllm.files import read_json
from jaxllm.models.architecture import read_architecture
from jaxllm.training.forward import RowModel
from jaxllm.training.objective import surprise
from jaxllm.training.tokenizer import load_tokenizer
from jaxllm.weights.checkpoint import resolve_model_dir

NAMES = [bundled.MODEL, bundled.DRAFT]
MAX_BYTES = 20_000_000
PROMPT = "import os\n\n\nclass Queue:\n    def __init__(self"


def folder(name: str) -> Path:
    path = bundled.path(name)
    assert path is not None
    return path


def test_names():
    assert bundled.path("some/model") is None
    assert [resolve_model_dir(name) for name in NAMES] == [folder(name) for name in NAMES]
    assert EngineArgs().model.model == bundled.MODEL


def test_the_package_stays_small():
    files = [f for name in NAMES for f in folder(name).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_model_has_all_its_files(name):
    names = {f.name for f in folder(name).iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "loss.svg", "manifest.jsonl",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    tokenizer_config = read_json(folder(name) / "tokenizer_config.json")
    assert "add_generation_prompt" in tokenizer_config["chat_template"]
    assert read_json(folder(name) / "config.json")["dtype"] == "bfloat16"


def test_the_draft_has_the_tokens_of_the_model_and_a_fraction_of_its_size():
    model, draft = map(folder, NAMES)
    assert (model / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()
    sizes = [(path / "model.safetensors").stat().st_size for path in (model, draft)]
    assert 5e6 < sizes[0] / 2 < 10e6 and sizes[1] / 2 < 1.5e6


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_completions_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder(name))
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    wanted = model.generate(**prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    llm = LLM(name, dtype="float32", enforce_eager=True, max_num_seqs=2, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].token_ids == wanted[0, prompt["input_ids"].shape[1] :].tolist()
    assert len(set(output.outputs[0].token_ids)) > 4


@pytest.mark.slow
def test_commands_need_no_model(capsys):
    sizes = ["--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "2"]
    prompt = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", "8"]
    assert main(["generate", *prompt, *sizes]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(PROMPT) and len(captured.out.strip()) > len(PROMPT)
    assert main(["plan", "--cpu", "--json", *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["cpu"]["model"] == bundled.MODEL


@pytest.mark.slow
def test_a_conversation_comes_to_an_end():
    llm = LLM(enforce_eager=True, max_num_seqs=2, max_model_len=512)
    question = "What does the Python function `close` do?"
    params = SamplingParams(temperature=0, max_tokens=200)
    [output] = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.strip()


@pytest.mark.slow
def test_heldout_text_costs_what_the_card_says():
    """On a few files of this Python that are held out, if it is the Python that was trained on."""
    manifest = (folder(bundled.MODEL) / "manifest.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in manifest]
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = []
    for entry in entries:
        root, _, below = entry["name"].partition("/")
        path = stdlib / below
        if entry["split"] == "heldout" and root == stdlib.name and path.is_file():
            raw = path.read_bytes()
            if hashlib.sha256(raw).hexdigest() == entry["sha256"] and len(raw) > 2000:
                texts.append(raw.decode()[:6000])
    if len(texts) < 4:
        pytest.skip("this Python is another one")
    tokenizer = load_tokenizer(folder(bundled.MODEL))
    model = RowModel(read_architecture(read_json(folder(bundled.MODEL) / "config.json")))
    weights = model.load(folder(bundled.MODEL))
    nats = num_bytes = 0
    tokenizer.encode_special_tokens = True
    for text in texts[:4]:
        ids = np.array([[0, *tokenizer.encode(text, add_special_tokens=False).ids[:512]]])
        nats += float(surprise(model.logits(weights, ids[:, :-1]), ids[:, 1:]).sum())
        num_bytes += len(tokenizer.decode(ids[0, 1:].tolist()).encode())
    assert nats / math.log(2) / num_bytes < 1.9
