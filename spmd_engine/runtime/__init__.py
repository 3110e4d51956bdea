"""The processes of a job: how they join, handle signals and end, a watchdog that reports hangs, and a supervisor."""
