"""The processes of a job: how they join, hear signals and end, a watchdog that reports hangs, and a supervisor."""
