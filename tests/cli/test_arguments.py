"""Flags are generated from the dataclasses: every field has one, and it means what it says."""

import argparse
import dataclasses
import json
import re
import typing

import msgspec
import pytest

from jaxllm.cli.arguments import (
    NOT_FLAGS,
    SAMPLING_HELP,
    SHORT_FLAGS,
    CommandParser,
    add_engine_arguments,
    add_option_arguments,
    add_sampling_arguments,
    engine_options_from,
    integer,
    sampling_params_from,
)
from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.options import ServerOptions
from jaxllm.vllm_options import INSTEAD, NEUTRAL, SHORT_NAMES, option_of_flag

ENGINE_FIELDS = [
    f for part in typing.get_type_hints(EngineConfig).values() for f in dataclasses.fields(part)
]


def make_parser(**kwargs) -> CommandParser:
    parser = CommandParser("jaxllm test", "Test.")
    add_engine_arguments(parser, **kwargs)
    add_sampling_arguments(parser)
    return parser


def parse(*argv: str) -> argparse.Namespace:
    return make_parser().parse(argv)


def config_from(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig.create(**engine_options_from(args))


def test_every_sampling_field_has_help_or_a_reason_to_have_no_flag():
    fields = {f.name for f in msgspec.structs.fields(SamplingParams)}
    assert fields == SAMPLING_HELP.keys() | NOT_FLAGS.keys()
    assert not SAMPLING_HELP.keys() & NOT_FLAGS.keys()


@pytest.mark.parametrize("f", ENGINE_FIELDS, ids=lambda f: f.name)
def test_every_engine_field_is_in_the_help(f):
    flags = [action.option_strings for action in make_parser()._actions if action.dest == f.name]
    wanted = [*SHORT_FLAGS.get(f.name, ()), "--" + f.name.replace("_", "-")]
    assert [found[: len(wanted)] for found in flags] == [wanted] * f.metadata["flag"]
    shown = f"  {wanted[0]} " in make_parser().format_help().replace(",", " ").replace("\n", " ")
    assert shown == f.metadata["flag"]


def test_a_short_flag_is_as_good_as_the_long_one():
    flags = ["-tp", "4", "-pp", "3", "-dp", "2"]
    options = engine_options_from(make_parser().parse(["model", *flags]))
    sizes = [options[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data")]
    assert sizes == [4, 3, 2]


def test_help_names_groups_and_defaults():
    text = " ".join(make_parser().format_help().split())
    for part in typing.get_type_hints(EngineConfig).values():
        assert f"{part.__doc__}:" in text
    assert "--gpu-memory-utilization X Share of an accelerator's memory" in text
    assert "engine may use. Default: 0.92." in text
    assert "Default: on." in text


def test_flags_reach_their_part_of_the_config():
    config = config_from(
        parse(
            *["m", "--block-size", "32", "--no-enable-prefix-caching", "--max-num-seqs", "8"],
            *["--dtype", "float32"],
            *["--hf-overrides", '{"rope_theta": 1e6}', "--enforce-eager"],
            *["--logits-processors", "a:B", "c:D"],
        )
    )
    assert config == EngineConfig.create(
        "m",
        block_size=32,
        enable_prefix_caching=False,
        max_num_seqs=8,
        dtype="float32",
        hf_overrides={"rope_theta": 1e6},
        enforce_eager=True,
        logits_processors=("a:B", "c:D"),
    )


def test_no_flags_mean_the_defaults_of_the_config():
    assert config_from(parse("--model", "m")) == EngineConfig.create("m")


def test_model_is_accepted_with_and_without_its_flag_at_any_place():
    assert config_from(parse("m", "--seed", "1")).model.model == "m"
    assert config_from(parse("--seed", "1", "m")).model.model == "m"
    assert config_from(parse("m", "--model", "m")).model.model == "m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "--model", "b"], "two models: 'a' and --model 'b'"),
        (["m", "--block-size", "17"], "block_size=17 is not a power of two"),
        (["m", "--max-num-seqs", "few"], "--max-num-seqs: 'few' is not a whole number"),
        (["m", "--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["m", "--hf-overrides", "{"], "--hf-overrides: '{' is not JSON"),
        (["m", "--hf-overrides", "[1]"], "'[1]' is not a JSON object"),
        (["m", "--hf-overrides", "[" * 100_000], "is not JSON: it is nested deeper than 64 levels"),
        (["m", "--blok-size", "16"], "unknown argument '--blok-size'; did you mean --block-size"),
        (["m", "--max-model", "16"], "unknown argument '--max-model'"),
        (["m", "--fully-sharded-loras"], "--fully-sharded-loras is not supported yet: adapters"),
        (["m", "--no-lora-dtype"], "--no-lora-dtype is not supported yet"),
        (["m", "--max-lora-rank", "17"], "max_lora_rank=17: use one of 1, 8, 16"),
        (["m", "--max-loras", "0"], "max_loras=0: give at least 1"),
        (["m", "--max-loras", "4", "--max-cpu-loras", "2"], "max_cpu_loras=2: it is below"),
        (["m", "-cc=3"], "-cc is not supported yet: XLA compiles every step"),
        (["m", "--kv-cache-dtype=fp9"], "--kv-cache-dtype: invalid choice: 'fp9'"),
        (["m", "--speculative-config.method", "ngram"], "did you mean --speculative-config?"),
        (["m", "--disable-uvicorn-access-log"], "--no-access-log leaves"),
        (["m", "--fingerprint-mode", "full"], "--fingerprint-mode is not supported yet"),
        (["m", "n"], "unknown argument 'n'; see `jaxllm test --help`"),
    ],
)
def test_bad_flags_are_refused_with_a_remedy(argv, message):
    with pytest.raises(ValidationError) as error:
        config_from(parse(*argv))
    assert message in str(error.value)


def test_what_is_said_to_be_missing_is_not_there_and_what_stands_in_is():
    parser = make_parser()
    add_option_arguments(parser, ServerOptions)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    ours = {option_of_flag(flag) for flag in flags if flag.startswith("--")}
    assert not ours & INSTEAD.keys() - {"disable_log_stats"}  # the server's
    assert not {f"-{short}" for short in SHORT_NAMES} & flags
    assert set(re.findall(r"--[a-z-]+", " ".join(INSTEAD.values()))) <= flags
    assert NEUTRAL.keys() <= INSTEAD.keys()
    assert set(SHORT_NAMES.values()) <= INSTEAD.keys()


def test_sampling_flags_override_the_defaults_and_only_them():
    defaults = SamplingParams(temperature=0.6, top_k=20, max_tokens=99)
    args = parse("m", "--temperature", "0", "--ignore-eos", "--logit-bias", '{"5": -1.5}')
    params = sampling_params_from(args, defaults)
    expected = SamplingParams(
        temperature=0.0, top_k=20, max_tokens=99, ignore_eos=True, logit_bias={5: -1.5}
    )
    assert params == expected
    assert defaults == SamplingParams(temperature=0.6, top_k=20, max_tokens=99)


def test_lists_take_several_values_and_repeated_flags():
    args = parse("m", "--stop", "a b", "c", "--stop", "d", "--stop-token-ids", "1", "2")
    params = sampling_params_from(args, SamplingParams())
    assert params.stop == ["a b", "c", "d"]
    assert params.stop_token_ids == [1, 2]


def test_every_sampling_flag_sets_its_field():
    values = {
        "n": 2, "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.5,
        "stop": ["x"], "stop_token_ids": [4], "include_stop_str_in_output": True,
        "ignore_eos": True, "max_tokens": 7, "min_tokens": 5, "logprobs": 6, "prompt_logprobs": 0,
        "logit_bias": {9: 1.0}, "allowed_token_ids": [9, 8], "bad_words": ["y"],
        "extra_args": {"x": 1}, "detokenize": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }  # fmt: skip
    assert values.keys() == SAMPLING_HELP.keys()
    argv = [word for name, value in values.items() for word in as_flag(name, value)]
    assert sampling_params_from(parse("m", *argv), SamplingParams()) == SamplingParams(**values)


def as_flag(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, dict):
        return [f"--{flag}", json.dumps(value)]
    return [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]


def test_a_command_can_leave_flags_out():
    parser = CommandParser("jaxllm test", "Test.")
    add_sampling_arguments(parser, without=("n",))
    with pytest.raises(ValidationError, match="unknown argument '--n'"):
        parser.parse(["--n", "2"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-1", -1), ("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25_600),
        ("2m", 2_000_000), ("2M", 2 * 2**20), ("1.5G", 3 * 2**29), ("4GiB", 4 * 2**30),
        ("2Ki", 2048), ("1t", 10**12), ("8K", 8192),
    ],
)  # fmt: skip
def test_sizes_may_be_written_short(text, value):
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "4GB", "4giB", "1e3", "0x10", "1 k"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
        integer(text)
