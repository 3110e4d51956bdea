"""``python -m spmd_engine`` and the installed command ``spmd-engine``: see ``--help``."""

import signal
import sys


def main() -> None:
    """Load and run the command line; a signal ends the process with a message of one line, on any rank."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until handlers are installed
    from spmd_engine.importing import many_imports
    from spmd_engine.runtime.launchers import one_blas_thread
    from spmd_engine.runtime.signals import StopFlag, exit_code, raise_interrupted

    try:
        with raise_interrupted():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
            with StopFlag(), many_imports(), one_blas_thread():
                # StopFlag handles a signal after the import: a partly loaded program cannot end cleanly.
                from spmd_engine.cli import main as run_command_line
            run_command_line()
    except KeyboardInterrupt as error:
        from spmd_engine.runtime.ending import end_at_once

        end_at_once(f"spmd_engine: {error}", exit_code(error, sys.argv))


if __name__ == "__main__":
    main()
