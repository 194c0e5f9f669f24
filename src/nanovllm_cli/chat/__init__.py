"""Conversations in a terminal: what is said, how it is kept, and what a person sees of it."""
