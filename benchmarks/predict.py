"""What compilers' output says of steps on chips that nobody has: bounds, never measurements.

    python benchmarks/predict.py steps --slice v6e-1 --shape 8b --steps d64 m2048

compiles whole steps for a slice of TPUs that is not there, and adds up what the compiler expects
of each operation. A step is compiled with two and with four layers: half of the difference is a
layer, and the rest is what every step has once. The compiler has no estimate for attention kernels,
so the sums lack them. The same estimator, before and after a change, shows what the change did. The
times themselves are as optimistic as the compiler.

    python benchmarks/predict.py launches --slice h200 --shape 8b --steps d64 d1 m2048

counts what a step launches on a GPU, by the names of the kernels, in the same way: of a layer, and
around the layers. Of a conditional the branch with the fewest launches counts, which is that of
greedy rows.

`--option name=value` adds a compiler option, to try one. Takes `pip install -e ".[dev,tpu]"`.
"""

import argparse
import dataclasses
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from jaxllm_kernels.topology import topology_devices
from priced_hlo import CLOCK_MHZ, operations

from jaxllm.config import EngineArgs
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.launches import (
    Launch,
    all_launches,
    by_name,
    compile_and_list,
    in_command_buffer,
    least,
)

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}
SHAPES = {
    "8b": LLAMA_3_8B,
    "70b": LLAMA_3_8B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
FEW, MORE = 2, 4  # layers that are compiled


class Costs(NamedTuple):
    """Of one compiled step, or of a part of one."""

    cycles: Counter[str]  # by part of the step
    num_operations: int
    num_kernels: int
    temp_bytes: int


def part_of(source: str, opcode: str) -> str:
    """The part of a step that an operation belongs to, by the scopes in its name."""
    if "/sample" in source:
        return "head" if "/logits/dot_general" in source and opcode != "copy" else "sampler"
    for scope in ("attention", "mlp"):
        if f"/{scope}/" in source:
            return f"{scope}: products" if "dot_general" in source else f"{scope}: the rest"
    return "the rest"


def costs_of(hlo: str, temp_bytes: int) -> Costs:
    cycles: Counter[str] = Counter()
    found = list(operations(hlo))
    for operation in found:
        cycles[part_of(operation.source, operation.opcode)] += operation.cycles or 0
    return Costs(cycles, len(found), sum(one.is_kernel for one in found), temp_bytes)


def compile_step(plan: EnginePlan, name: str, options: dict[str, str]) -> Costs:
    """Compile a step such as d64, the decodes of 64 rows, or m2048, a mixed step."""
    declared = declare_programs(plan, make_packer(plan).layouts)
    program = declared[_bucket(plan, name)]
    all_options = dict(program.compiler_options) | options
    program = dataclasses.replace(program, compiler_options=tuple(all_options.items()))
    compiled = program.compile(program.lower())
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    assert hlo is not None and memory is not None, "the compiler describes its programs"
    return costs_of(hlo, memory.temp_size_in_bytes)


def list_launches(plan: EnginePlan, name: str, options: dict[str, str]) -> list[Launch]:
    """What is directly in the one command buffer of a step."""
    declared = declare_programs(plan, make_packer(plan).layouts)
    program = declared[_bucket(plan, name)]
    all_options = dict(program.compiler_options) | options
    program = dataclasses.replace(program, compiler_options=tuple(all_options.items()))
    with tempfile.TemporaryDirectory() as folder:
        *_, outermost = compile_and_list(program, Path(folder) / "dump")
    return in_command_buffer(outermost)


def count_launches(plans: dict[int, EnginePlan], name: str, options: dict[str, str]) -> dict:
    """The launches of a layer and around the layers, by kernel."""
    few, more = (list_launches(plans[num], name, options) for num in (FEW, MORE))
    of_few, of_more = by_name(few), by_name(more)
    layer = {
        kernel: count / (MORE - FEW)
        for kernel in of_more
        if (count := of_more[kernel] - of_few[kernel])
    }
    num_layer = (len(more) - len(few)) / (MORE - FEW)
    around = {
        kernel: count - FEW * layer.get(kernel, 0)
        for kernel, count in of_few.items()
        if count - FEW * layer.get(kernel, 0)
    }
    num_branches = least(few) - len(few)
    return {
        "step": name,
        "of_a_layer": num_layer,
        "around": len(few) - FEW * num_layer + num_branches,
        "in_all": len(list(all_launches(few))) - FEW * num_layer,
        "layer": layer,
        "outside": around | {"in the shortest branches": num_branches},
    }


def show_launches(line: dict) -> None:
    print(
        f"\n{line['step']}: {line['of_a_layer']:g} launches a layer, {line['around']:g} around "
        f"them ({line['in_all']:g} with all branches)"
    )
    for where in ("layer", "outside"):
        for kernel, count in sorted(line[where].items()):
            print(f"  {where:<8}{count:>6g}  {kernel}")


def _bucket(plan: EnginePlan, name: str) -> Bucket:
    found = {f"{'d' if one.decode_only else 'm'}{one.num_tokens}": one for one in plan.buckets}
    if name not in found:
        raise SystemExit(f"no step {name}; there are {', '.join(found)}")
    return found[name]


def make_plans(args: argparse.Namespace, folder: Path) -> dict[int, EnginePlan]:
    """The plans by number of layers."""
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    devices = topology_devices(args.slice)
    return {
        num_layers: make_plan(
            EngineArgs(
                model=str(folder),
                hf_overrides={"num_hidden_layers": num_layers},
                max_model_len=8192,
                max_num_seqs=args.rows,
                max_num_batched_tokens=args.tokens,
                num_gpu_blocks_override=1024,
                tensor_parallel_size=args.tensor_parallel_size,
            ),
            devices[: args.tensor_parallel_size],
        )
        for num_layers in (FEW, MORE)
    }


def predict_step(plans: dict[int, EnginePlan], name: str, options: dict[str, str]) -> dict:
    """Microseconds of a layer and of the rest of a step, by part."""
    few, more = (compile_step(plans[num], name, options) for num in (FEW, MORE))
    per_us = CLOCK_MHZ[plans[FEW].chip.name]
    parts = sorted(few.cycles | more.cycles)
    layer = {part: (more.cycles[part] - few.cycles[part]) / (MORE - FEW) / per_us for part in parts}
    around = {part: few.cycles[part] / per_us - FEW * layer[part] for part in parts}
    return {
        "step": name,
        "layer_us": {part: round(us, 1) for part, us in layer.items()},
        "around_us": {part: round(us, 1) for part, us in around.items()},
        "operations_a_layer": (more.num_operations - few.num_operations) / (MORE - FEW),
        "temp_mebibytes": round(more.temp_bytes / 2**20),
    }


def show(line: dict, num_layers: int) -> None:
    layer, around = sum(line["layer_us"].values()), sum(line["around_us"].values())
    print(
        f"\n{line['step']}: {num_layers} layers of {layer:.0f} us, {around:.0f} us around them: "
        f"{(num_layers * layer + around) / 1e3:.2f} ms without attention kernels; "
        f"{line['operations_a_layer']:.0f} operations a layer, {line['temp_mebibytes']} MiB "
        "of temporaries"
    )
    for part, us in line["layer_us"].items():
        print(f"  {part:<22}{us:>9.1f}{line['around_us'][part]:>9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["steps", "launches"])
    parser.add_argument("--slice", default="v6e-1", help="a slice of TPUs, or h200")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--steps", nargs="+", default=["d64", "m2048"])
    parser.add_argument("--rows", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="name=value")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.option)
    with tempfile.TemporaryDirectory() as folder:
        plans = make_plans(args, Path(folder))
        lines = []
        for name in args.steps:
            if args.what == "launches":
                lines.append(count_launches(plans, name, options))
            else:
                lines.append(predict_step(plans, name, options))
            if args.json:
                continue
            if args.what == "launches":
                show_launches(lines[-1])
            else:
                show(lines[-1], SHAPES[args.shape]["num_hidden_layers"])
    if args.json:
        print(json.dumps({"arguments": vars(args), "steps": lines}))


if __name__ == "__main__":
    main()
