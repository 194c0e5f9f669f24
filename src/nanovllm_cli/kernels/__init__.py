"""Kernels, and the public ops over them. `reference` says what each op means; this file picks the device's implementation."""
