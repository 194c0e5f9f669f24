"""`nanovllm serve`: HTTP on one side, engines in processes of their own on the other."""
