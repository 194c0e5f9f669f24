"""Text at both ends of the engine: tokenizers, chat templates, decoding of streams, reasoning blocks."""
