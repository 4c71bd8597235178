"""A web page to chat with the model and to watch the engine: HTML, CSS and JavaScript files."""
