"""What benchmarks/gpu/all.py runs on a machine with a GPU, one job a file. See all.py."""
