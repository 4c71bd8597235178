"""A page to talk to the model, and to watch the engine: HTML, CSS and JavaScript as they are."""
