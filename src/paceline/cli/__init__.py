"""Commands: serve, generate, chat, bench."""
