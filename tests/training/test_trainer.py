"""Whole runs on a little text: they learn, go on after a kill, distil, and export what serves."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ValidationError
from jaxllm.training.options import TeacherOptions, TrainOptions
from jaxllm.training.trainer import Trainer


def log_of(options: TrainOptions) -> list[dict]:
    lines = (Path(options.output) / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def as_flags(options: TrainOptions) -> list[str]:
    """What asks `jaxllm train` for these options."""
    flags = []
    for part in (options.data, options.shape, options.run):
        for name, value in dataclasses.asdict(part).items():
            if value is None or value == ():
                continue
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    return ["train", options.output, *flags]


def losses(options: TrainOptions) -> list[float]:
    return [record["loss"] for record in log_of(options)]


def weights_of(options: TrainOptions) -> dict[str, np.ndarray]:
    return load_file(Path(options.output) / "model" / "model.safetensors")


def assert_same_weights(one: TrainOptions, other: TrainOptions) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_very_same_end(small_run):
    run = {"steps": 160, "save_steps": 20, "eval_steps": 80}
    straight, killed = small_run("straight", **run), small_run("killed", **run)
    Trainer(straight).run()
    log = Path(killed.output) / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-m", "jaxllm.cli.main", *as_flags(killed)])
    while not log.exists() or log.read_bytes().count(b"\n") < 50:
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (Path(killed.output) / "model").exists()
    log.write_bytes(log.read_bytes() + b'{"step": 99, "lo')  # a torn line

    # What was asked is kept, too.
    assert main(["train", killed.output]) == 0
    assert [record["step"] for record in log_of(killed)] == list(range(1, 161))
    assert losses(killed) == losses(straight)
    assert_same_weights(killed, straight)


@pytest.fixture(scope="module")
def first(small_run) -> Trainer:
    """A run that is done."""
    trainer = Trainer(small_run("first", steps=320, learning_rate=1e-2, eval_steps=320))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def first_model(first) -> str:
    return str(first.folder / "model")


@pytest.mark.slow
def test_a_run_learns_and_its_model_serves(first, first_model):
    before = first.bits_per_byte(first.model.initial_weights(0))
    after = log_of(first.options)[-1]["heldout_bits_per_byte"]
    # The first weights know nothing: they give every token the same probability.
    tokens_per_byte = (len(first.data.heldout) - 1) / first.data.heldout_bytes
    assert before == pytest.approx(np.log2(320) * tokens_per_byte, rel=0.02)
    assert after < 0.75 * before

    llm = LLM(first_model, enforce_eager=True, max_num_seqs=2, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = llm.generate("import ", params, use_tqdm=False)
    assert output.outputs[0].text


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.slow
def test_a_limit_of_time_is_that_of_the_whole_run(small_run, monkeypatch):
    monkeypatch.setattr("jaxllm.training.trainer.time", clock := Clock())
    options = small_run("timed", minutes=0.5, eval_steps=1000)
    trainer = Trainer(options)
    clock.now += 10  # to prepare
    trainer.run()
    steps = log_of(options)
    # What is left of 30 s, but for those that a measurement and writing are thought to take.
    assert 5 < len(steps) < 17 and steps[0]["seconds"] > 10
    assert clock.now < 27
    assert steps[-1]["learning_rate"] < 0.5 * steps[0]["learning_rate"]

    late = Trainer(small_run("late", minutes=0.5))
    clock.now += 60
    with pytest.raises(ValidationError, match="minutes=0.5: they would be over before the first"):
        late.run()


@pytest.mark.slow
def test_a_draft_comes_nearer_to_its_teacher(small_run, first_model):
    options = small_run(
        "draft",
        data={"tokenizer": first_model},
        steps=60,
        learning_rate=1e-2,
        seed=1,
        teacher=TeacherOptions(teacher=first_model, teacher_weight=1.0),
    )
    Trainer(options).run()
    apart = [record["teacher_distance"] for record in log_of(options)]
    # It sees the text through its teacher alone, and learns both.
    assert np.mean(apart[-10:]) < 0.5 * apart[0]
    assert losses(options)[-1] < losses(options)[0] - 0.5


@pytest.mark.slow
def test_a_run_may_begin_with_the_weights_of_a_model_and_be_prolonged(
    small_run, first, first_model
):
    again = {
        "data": {"tokenizer": first_model}, "initial_model": first_model, "learning_rate": 1e-15
    }  # fmt: skip
    Trainer(small_run("again", steps=1, **again)).run()
    longer = small_run("again", steps=3, **again)
    Trainer(longer).run()
    assert [record["step"] for record in log_of(longer)] == [1, 2, 3]
    assert_same_weights(longer, first.options)


@pytest.mark.slow
def test_refusals(small_run, first, first_model):
    with pytest.raises(ValidationError, match="seed=7: the run in .* has 0; give that"):
        Trainer(small_run("first", steps=2, seed=7))
    with pytest.raises(ValidationError, match="no data; give files or folders"):
        Trainer(small_run("none", steps=2, data={"data": ()}))
    with pytest.raises(ValidationError, match="heldout_share=0.0: .* all or none would be held"):
        Trainer(small_run("all", steps=2, data={"heldout_share": 0.0}))
    with pytest.raises(ValidationError, match="it has other tokens; give it as the tokenizer"):
        teacher = TeacherOptions(teacher=first_model)
        Trainer(small_run("other", steps=2, data={"vocab_size": 300}, teacher=teacher))
    with pytest.raises(ValidationError, match="it has no checkpoint yet"):
        Trainer(small_run("empty", steps=2)).export_latest()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({}, "a run needs an end; give steps or minutes"),
        ({"steps": 0}, "steps=0: it must be a number above zero"),
        ({"minutes": -1.0}, "minutes=-1.0"),
        ({"steps": 1, "decay_share": 1.5}, "decay_share=1.5: it is a share, at most 1"),
        ({"steps": 1, "context": 200}, "context=200: max_model_len=128; raise that"),
    ],
)
def test_options_are_checked_before_anything_is_read(small_run, run, message):
    with pytest.raises(ValidationError, match=message):
        small_run("unfit", **run).validate()
