"""Low-rank structure in deep learning: the package behind the executable companion."""
