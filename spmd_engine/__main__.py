"""``python -m spmd_engine`` and the installed command ``spmd-engine``: see ``--help``."""

from spmd_engine.importing import many_imports
from spmd_engine.process.launchers import one_blas_thread
from spmd_engine.process.signals import StopFlag, exit_code


def main() -> None:
    """Load the command line and run it; both ways to start the program begin here."""
    try:
        with StopFlag(), many_imports(), one_blas_thread():
            # A signal while modules load is heard once they are: a half-loaded program cannot end well.
            from spmd_engine.cli import main as run_command_line
    except KeyboardInterrupt as error:
        from spmd_engine.process.ending import end_at_once

        end_at_once(f"spmd_engine: {error}", exit_code(error))
    run_command_line()


if __name__ == "__main__":
    main()
