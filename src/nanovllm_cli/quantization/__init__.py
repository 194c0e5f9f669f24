"""Quantizing whole models: what becomes what, calibration, files, and how much was lost.

Which numbers are best is chosen in `quant/`.
"""
