"""Profiles come on demand, where the engine was started to write them, and hold steps."""

import pytest
from jax.profiler import ProfileData

from jaxllm import LLM, SamplingParams, ValidationError
from jaxllm.testing import make_tiny_checkpoint
from tests.profile import TINY

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def num_steps(path):
    planes = ProfileData.from_file(str(path)).planes
    return sum(event.name == "step" for p in planes for line in p.lines for event in line.events)


def test_a_profile_holds_the_steps_that_were_run_meanwhile(tmp_path):
    llm = LLM(make_tiny_checkpoint(tmp_path / "model"), profile_dir=str(tmp_path / "p"), **TINY)
    llm.generate("a", PARAMS, use_tqdm=False)
    with pytest.raises(ValidationError, match="no profile is being taken"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(ValidationError, match="stop it first"):
        llm.start_profile()
    llm.generate("a", PARAMS, use_tqdm=False)
    llm.stop_profile()
    (path,) = (tmp_path / "p").rglob("*.xplane.pb")
    assert num_steps(path) == 5
    # What is being taken when the engine ends is written out.
    path.unlink()
    llm.start_profile()
    llm.generate("a", PARAMS, use_tqdm=False)
    llm.shutdown()
    (path,) = (tmp_path / "p").rglob("*.xplane.pb")
    assert num_steps(path) == 5


def test_without_a_directory_there_are_no_profiles(tmp_path):
    llm = LLM(make_tiny_checkpoint(tmp_path), **TINY)
    with pytest.raises(ValidationError, match="start the engine with profile_dir"):
        llm.start_profile()
