"""Serve a model over HTTP, by OpenAI's protocol: `eagle-serve`."""
