"""HTTP: the OpenAI schema, streaming, errors, health and metrics."""
