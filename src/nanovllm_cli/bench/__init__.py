"""Measuring: workloads, figures, reports."""
