"""From a checkpoint on disk to arrays on devices."""
