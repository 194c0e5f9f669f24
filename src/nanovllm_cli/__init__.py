"""llama.cpp's command line on vLLM's engine."""
