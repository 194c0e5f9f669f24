"""Quantizing whole models: what becomes what, calibration, files, and how much was lost. The numbers themselves are chosen in `quant/`."""
