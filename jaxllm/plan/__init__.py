"""Decides what will run, once: from the user's options, the model, the devices and their memory."""
