"""`python -m deepinfer_jax` is the command `deepinfer-jax`."""

import sys

from deepinfer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
