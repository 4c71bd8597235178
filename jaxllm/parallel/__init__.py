"""Several devices as one: meshes, and where arrays lie on them."""
