"""The search for the plan of a job: candidates, their bounds, estimates and evaluations."""
