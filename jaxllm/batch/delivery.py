"""The last stage: copies the results to their destination, in the order of the input if requested.

It can be repeated after a kill at any moment: its input stays until it is done.
"""

import mmap
import os
import struct
from pathlib import Path

from jaxllm.batch.journal import Kind, read_journal

_PLACE = struct.Struct("<QQ")  # offset and size of a result; size 0: of another kind


def write_ordered(journal: Path, kind: Kind, results: Path, to: Path, num_items: int) -> None:
    """Copy the results of one kind in the order of their items.

    An index on disk has the place of each item's result. One pass over the journal fills it, and
    another reads it to copy, so memory does not grow with the batch.
    """
    index_path = to.with_name(to.name + ".index")
    try:
        with open(index_path, "w+b") as index_file:
            # Allocate the file: a hole in a mapped file would kill the process when the disk is
            # full. It has one more entry, because an empty file cannot be mapped.
            os.posix_fallocate(index_file.fileno(), 0, (num_items + 1) * _PLACE.size)
            with mmap.mmap(index_file.fileno(), 0) as index, open(to, "wb") as target:
                for entry in read_journal(journal):
                    if entry.kind == kind:
                        place = entry.item * _PLACE.size
                        _PLACE.pack_into(index, place, entry.offset, entry.size)
                with open(results, "rb") as source:
                    for item in range(num_items):
                        offset, size = _PLACE.unpack_from(index, item * _PLACE.size)
                        if size:
                            source.seek(offset)
                            target.write(source.read(size))
                target.flush()
                os.fsync(target.fileno())
    finally:
        index_path.unlink(missing_ok=True)
