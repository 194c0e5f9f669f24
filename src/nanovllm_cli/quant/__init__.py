"""How weights are stored and multiplied. A FORMAT is storage and matmul; an ALGORITHM chooses numbers."""
