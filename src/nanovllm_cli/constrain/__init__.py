"""Structured output: which tokens may come next, over llguidance. A side room: it imports itself and tier 0 only."""
