"""Talking to an OpenAI-compatible server: connections, events, what is asked and what comes back."""
