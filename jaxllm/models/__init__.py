"""Model families: what a config says about them, and the modules that the runner traces."""
