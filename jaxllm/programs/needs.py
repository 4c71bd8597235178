"""What all programs of a stage need beside their arguments, known before all are compiled."""

from collections.abc import Hashable, Mapping

from jaxllm.programs.compile import Program
from jaxllm.programs.declare import LateKey


def needed_bytes(programs: Mapping[Hashable, Program], *, temp_bytes: int, code_bytes: int) -> int:
    """The most temporaries at a time, and the code of all programs.

    `temp_bytes` and `code_bytes` are those of the largest step. Other programs count as long as it,
    but not those that sample late rows: they have no layers, and all have about the same code. The
    largest of them is compiled here.
    """
    late = [key for key in programs if isinstance(key, LateKey)]
    late_temp_bytes = late_code_bytes = 0
    if late:
        largest = programs[max(late)]
        memory = largest.compile(largest.lower()).memory_analysis()
        if memory is not None:
            late_temp_bytes = memory.temp_size_in_bytes
            late_code_bytes = memory.generated_code_size_in_bytes
    return (
        max(temp_bytes, late_temp_bytes)
        + code_bytes * (len(programs) - len(late))
        + late_code_bytes * len(late)
    )
