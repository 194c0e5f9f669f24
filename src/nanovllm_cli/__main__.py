"""`python -m nanovllm_cli`: the same as the `nanovllm` command."""

from nanovllm_cli.cli.app import main

if __name__ == "__main__":
    main()
