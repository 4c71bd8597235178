"""What all programs of a stage need beside their arguments, known before all are compiled."""

from collections.abc import Hashable, Mapping

from jaxllm.programs.compile import Program
from jaxllm.programs.declare import EncodeKey, LateKey


def needed_bytes(programs: Mapping[Hashable, Program], *, temp_bytes: int, code_bytes: int) -> int:
    """The most temporaries at a time, and the code of all programs.

    `temp_bytes` and `code_bytes` are those of the largest step. Other programs count as long as it,
    but not those that sample late rows, which have no layers, and those of a tower. All of a kind
    have about the same code. The largest of each is compiled here.
    """
    num_others, more_code = len(programs), 0
    for kind in (LateKey, EncodeKey):
        its = [key for key in programs if isinstance(key, kind)]
        if not its:
            continue
        largest = programs[max(its)]
        memory = largest.compile(largest.lower()).memory_analysis()
        num_others -= len(its)
        if memory is not None:
            temp_bytes = max(temp_bytes, memory.temp_size_in_bytes)
            more_code += memory.generated_code_size_in_bytes * len(its)
    return temp_bytes + code_bytes * num_others + more_code
