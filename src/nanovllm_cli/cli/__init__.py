"""The command line: `app.main` is the border, then one file a command that parses, calls one function and prints.

stdout carries the answer and nothing else; everything else goes to stderr. Exit codes are decided in `app` alone,
from the typed errors of `nanovllm_cli.errors`. Nothing here imports torch before a command needs a model.
"""
