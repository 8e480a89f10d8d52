"""GPU and CPU kernels, each beside its torch reference."""

# transformers asks a package called `kernels` for its version while it loads model code; it finds this one.
__version__ = "0.0.0"
