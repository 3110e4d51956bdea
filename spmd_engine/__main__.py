"""``python -m spmd_engine``: see ``--help``."""

from spmd_engine.cli import main

if __name__ == "__main__":
    main()
