"""What has to be set before JAX starts."""

import os

# The warpgroups of a GPU kernel in interpret mode wait for each other on threads of XLA's CPU pool,
# which has as many as the machine has cores. With fewer than warpgroups they would wait forever.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

# Otherwise a second process that compiles for TPUs dies of the first one's lock file.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
