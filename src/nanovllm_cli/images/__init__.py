"""Images that come with a prompt: as clients send them, decoded, and of the size that a model wants. A side room."""
