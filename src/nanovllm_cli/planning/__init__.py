"""What a model is and what it would take to run it, from headers alone."""
