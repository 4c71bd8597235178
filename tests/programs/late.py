"""What programs that sample late rows take beside a step, seen by compiling the largest of them."""

from collections.abc import Hashable, Mapping

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.programs.compile import Program
from jaxllm.programs.declare import LateKey


def late_rows_bytes(plan: EnginePlan, declared: Mapping[Hashable, Program]) -> int:
    """The code of all of them, which are alike, and the logits of a step that waits for its masks
    while the next one runs."""
    late = [key for key in declared if isinstance(key, LateKey)]
    largest = declared[max(late)]
    memory = largest.compile(largest.lower()).memory_analysis()
    return memory.generated_code_size_in_bytes * len(late) + 4 * plan.max_num_seqs * plan.num_logits


def num_steps(declared: Mapping[Hashable, Program]) -> int:
    return sum(not isinstance(key, LateKey) for key in declared)
