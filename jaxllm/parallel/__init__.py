"""Several devices that run one model: meshes, the sharding of arrays, joining hosts."""
