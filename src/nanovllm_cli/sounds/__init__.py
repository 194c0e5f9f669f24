"""Sounds that come with a prompt: as clients send them, decoded, made into spectrograms that a model hears. A side room."""
