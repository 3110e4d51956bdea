"""``python -m spmd_engine``: see ``--help``."""

import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends this, without a traceback
    from spmd_engine.cli import main

    main()
