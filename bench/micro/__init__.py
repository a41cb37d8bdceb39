"""Times of single kernels on a GPU, for choosing their tilings: python -m bench.micro.NAME."""
