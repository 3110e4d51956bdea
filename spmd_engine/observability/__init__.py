"""What is known of runs, steps, shardings and machines, as text, pictures and pages."""
